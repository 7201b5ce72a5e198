"""Classes that keep a loss of their own, trained by a plain loop: encoders, encoder-decoders, towers side by side."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification as Classifier,
)

import hfscale
from hfscale import ConfigError, ParallelConfig, PlanError
from hfscale.models.clone import tiny_clone
from hfscale.testing import RankPool, assert_layout_equal, plain
from tests.plain_cases import image_text_pairs

Pools = Callable[[int], RankPool]
TP2 = ParallelConfig(tp_size=2)
_T5 = {"pad_token_id": 0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
_BART = {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 3}
_DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 8,
    "pad_token_id": 0,
}
CASES: dict[str, tuple[str, str, plain.Maker, dict[str, Any]]] = {
    "classes of texts": (
        "bert",
        "BertForSequenceClassification",
        plain.sequence_classification,
        {},
    ),
    "classes of tokens": (
        "distilbert",
        "DistilBertForTokenClassification",
        plain.token_classification,
        {},
    ),
    "masked tokens": ("roberta", "RobertaForMaskedLM", plain.causal_lm, {"pad_token_id": 1}),
    "one layer many times": ("albert", "AlbertForMaskedLM", plain.causal_lm, {}),
    "a table of positions that every layer reads": (
        "deberta-v2",
        "DebertaV2ForSequenceClassification",
        plain.sequence_classification,
        _DEBERTA,
    ),
    "relative biases": ("t5", "T5ForConditionalGeneration", plain.sequence_to_sequence, _T5),
    "relative biases, gated": (
        "mt5",
        "MT5ForConditionalGeneration",
        plain.sequence_to_sequence,
        _T5,
    ),
    "attention to an encoder": (
        "bart",
        "BartForConditionalGeneration",
        plain.sequence_to_sequence,
        _BART,
    ),
    "positions that are never stored": (
        "marian",
        "MarianMTModel",
        plain.sequence_to_sequence,
        {**_BART, "decoder_vocab_size": 67},
    ),
    "speech": (
        "whisper",
        "WhisperForConditionalGeneration",
        plain.speech_to_text,
        {**_BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40},
    ),
    "images": ("vit", "ViTForImageClassification", plain.image_classification, {"image_size": 32}),
    "two towers": ("clip", "CLIPModel", image_text_pairs, {}),
    "a decoder alone": ("bart", "BartForCausalLM", plain.causal_lm, {"pad_token_id": None}),
}


def case(kind: str, **changes: Any) -> plain.PlainCase:
    family, name, maker, own = CASES[kind]
    config = tiny_clone(AutoConfig.for_model(family), **{"pad_token_id": None, **own, **changes})
    if hasattr(config, "vision_config"):
        config.vision_config.image_size, config.vision_config.patch_size = 32, 8
    return plain.PlainCase(config, auto_class=getattr(transformers, name), make_batch=maker)


@pytest.mark.daily("two towers", "relative biases", "one layer many times")
@pytest.mark.parametrize("kind", CASES)
def test_tensor_ranks(pools: Pools, kind: str) -> None:
    assert_layout_equal(case(kind), TP2, pools(2))


@pytest.mark.daily("classes of texts")
@pytest.mark.parametrize("kind", ["classes of texts", "attention to an encoder"])
def test_tensor_and_data_ranks(pools: Pools, kind: str) -> None:
    assert_layout_equal(case(kind), ParallelConfig(tp_size=2, dp_shard_size=2), pools(4))


def test_every_stack_is_cut() -> None:
    planned = hfscale.plan(
        case("relative biases").config, TP2, auto_class=transformers.T5ForConditionalGeneration
    )
    assert planned.layers == (
        "encoder.block.0",
        "encoder.block.1",
        "decoder.block.0",
        "decoder.block.1",
    )
    assert len(planned.blocks) == 2 * 2 + 2 * 3
    cross = next(
        block for block in planned.blocks if block.name == "decoder.block.1.layer.1.EncDecAttention"
    )
    assert "key_value_states" in cross.enter_inputs
    bias = planned.by_name["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    assert (bias.shape, bias.local_shape({})) == ((8, 4), (8, 2))


def test_a_class_with_one_of_two_stacks() -> None:
    assert hfscale.plan(case("a decoder alone").config, TP2).layers == (
        "model.decoder.layers.0",
        "model.decoder.layers.1",
    )
    encoder = hfscale.plan(
        case("relative biases").config, TP2, auto_class=transformers.T5EncoderModel
    )
    assert encoder.layers == ("encoder.block.0", "encoder.block.1")
    tower = hfscale.plan(
        case("two towers").config.vision_config, TP2, auto_class=transformers.CLIPVisionModel
    )
    assert len(tower.blocks) == 4


@pytest.mark.parametrize("half", ["encoder", "decoder"])
def test_heads_of_one_half_that_do_not_divide_are_refused(half: str) -> None:
    config = tiny_clone(BartConfig())
    setattr(config, f"{half}_attention_heads", 1)
    with pytest.raises(
        PlanError, match=r"does not divide the 1 attention heads .*: use tp_size 1$"
    ):
        hfscale.plan(config, TP2, auto_class=BartForConditionalGeneration)


def test_train_step_takes_a_loss_of_the_models_own() -> None:
    """One that is a mean: see test_own_loss. A contrast between the rows of a batch depends on how it is divided."""
    wanted = case("classes of texts")
    model = hfscale.from_config(wanted.config, auto_class=Classifier).eval()
    batch = wanted.batches(1)[0][0][0]
    assert hfscale.train_step(model, batch).item() == pytest.approx(
        model(**batch).loss.item(), rel=1e-6
    )
    contrast = case("two towers")
    model = hfscale.from_config(contrast.config, auto_class=contrast.auto_class)
    with pytest.raises(ConfigError, match=r"CLIPModel has another .* loop over loss = model"):
        hfscale.train_step(model, {**contrast.batches(1)[0][0][0], "labels": torch.zeros(3)})


def test_whole_activations_are_dropped_out_alike(pools: Pools) -> None:
    with_dropout = case("classes of texts", hidden_dropout_prob=0.3, classifier_dropout=0.2)
    assert_layout_equal(replace(with_dropout, seed=5), TP2, pools(2))


def test_a_table_that_heads_share_is_dropped_out_alike(pools: Pools) -> None:
    # Its dropout is inside a block whose attention weights have one too, which differs between ranks.
    kind = "a table of positions that every layer reads"
    found = pools(2).run(
        _dropouts, case(kind, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    )
    (table, weights), (other_table, other_weights) = found
    assert torch.equal(table, other_table)
    assert not torch.equal(weights, other_weights)
    assert 0 < table.double().mean() < 1


def _dropouts(case: plain.PlainCase) -> tuple[torch.Tensor, torch.Tensor]:
    """What two dropouts inside a block left: of the table of positions, of the weights of this rank's heads."""
    torch.manual_seed(5)
    model = hfscale.from_config(case.config, parallel=TP2, auto_class=case.auto_class).train()
    attention = model.deberta.encoder.layer[1].attention.self
    kept = {}
    for name in ("pos_dropout", "dropout"):
        module = getattr(attention, name)
        module.register_forward_hook(
            lambda _, args, output, name=name: kept.update({name: output != 0})
        )
    model(**case.batches(1)[0][0][0])
    return kept["pos_dropout"], kept["dropout"]


def test_training_with_dropout_keeps_ranks_together(pools: Pools) -> None:
    config = case(
        "classes of texts", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2
    ).config
    (loss, whole), (other_loss, other_whole) = pools(2).run(_train_with_dropout, config)
    assert loss == other_loss
    assert len(loss) == len(set(loss))  # every step draws other masks
    assert whole.keys() == other_whole.keys() != set()
    for name, value in whole.items():
        assert torch.equal(value, other_whole[name]), name


def _train_with_dropout(config: BertConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = hfscale.from_config(config, parallel=TP2, auto_class=Classifier).train()
    # The ranks have drawn different numbers before.
    torch.manual_seed(100 + torch.distributed.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = plain.PlainCase(config, make_batch=plain.sequence_classification).batches(1)[0][0][0]
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        hfscale.clip_grad_norm_(model, 1.0)
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    planned = hfscale.plan(config, TP2, auto_class=Classifier).by_name
    parameters = dict(model.named_parameters())
    return losses, {name: p.detach() for name, p in parameters.items() if not planned[name].cuts}
