"""What would go wrong without a word: PEFT's own methods on one rank's part, failures halfway, ties, mixed types."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoHaConfig, LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig
from hfscale.testing import Case, RankPool, assert_layout_equal

from ...mixtures import qwen3_moe
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
IDS = torch.arange(24).reshape(4, 6)
BATCH = {"input_ids": IDS, "labels": IDS}


def _lora(**changes: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    )


def _loaded(start: str, sizes: dict[str, Any], **kwargs: Any) -> Any:
    return hfscale.from_pretrained(start, parallel=ParallelConfig(**sizes), **kwargs)


def _message(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def _start(directory: Path, **changes: Any) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama", **changes)).save_pretrained(directory)
    return str(directory)


def _own_methods(start: str) -> tuple[list[str], tuple[int, int], str]:
    model = hfscale.get_peft_model(_loaded(start, {"tp_size": 2}), _lora())
    messages = [
        _message(call)
        for call in (
            model.merge_adapter,
            lambda: model.get_base_model().add_adapter(_lora()),
            lambda: model.base_model.delete_adapter("default"),
        )
    ]
    merged = model.merge_and_unload(safe_merge=True)
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    left = sorted(
        name for name in ("add_adapter", "load_adapter", "peft_config") if name in merged.__dict__
    )
    return messages, model.get_nb_trainable_parameters(), ", ".join(left)


def test_methods_of_pefts_model(pools: Pools, tmp_path: Path) -> None:
    """On one rank's part they would write, merge or train as if that were the model."""
    start = _start(tmp_path / "start")
    counts = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(start), _lora()
    ).get_nb_trainable_parameters()
    for messages, found, left in pools(2).run(_own_methods, start):
        assert all("does not work on a sharded model" in message for message in messages)
        assert found == counts
        assert left == ""


def _state_dicts(start: str, sizes: dict[str, Any]) -> list[str] | None:
    """What it says where ranks hold parts; else nothing, once it has returned the whole adapter."""
    layout = {"num_microbatches": 2, **sizes} if "pp_size" in sizes else sizes
    model = _loaded(start, layout)
    wrapped = hfscale.get_peft_model(model, _lora())
    stock = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(start), _lora())
    if "dp_replicate_size" in sizes:
        found, expected = (peft.get_peft_model_state_dict(each) for each in (wrapped, stock))
        assert {name: each.shape for name, each in found.items()} == {
            n: each.shape for n, each in expected.items()
        }
        return None
    assert len(peft.get_peft_model_state_dict(stock)) == 28
    return [
        _message(lambda: peft.get_peft_model_state_dict(wrapped)),
        _message(lambda: peft.utils.get_peft_model_state_dict(model)),
    ]


@pytest.mark.daily("tp_size", "dp_shard_size")
@pytest.mark.parametrize("axis", ["tp_size", "pp_size", "dp_shard_size", "dp_replicate_size"])
def test_a_part_of_an_adapter_is_not_taken_for_all_of_it(
    pools: Pools, tmp_path: Path, axis: str
) -> None:
    start = _start(tmp_path)
    for messages in pools(2).run(_state_dicts, start, {axis: 2}):
        assert (messages is None) == (axis == "dp_replicate_size")
        assert all(
            "call hfscale.save_pretrained(model, directory)" in message
            for message in messages or ()
        )


def _goes_on(start: str, wrong: str, sizes: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and norm of a step before and after failures."""
    model = _loaded(start, sizes).train()

    def step() -> tuple[float, float]:
        loss = float(hfscale.train_step(model, BATCH))
        norm = float(hfscale.clip_grad_norm_(model, 1e9))
        model.zero_grad()
        return loss, norm

    found = [step()]
    with pytest.raises(CheckpointError, match="has the shape"):
        hfscale.get_peft_model(model, wrong)
    found.append(step())
    if "tp_size" in sizes:
        embedding = _lora(target_modules=["embed_tokens"], use_dora=True)
        assert "DoRA on an embedding" in _message(lambda: hfscale.get_peft_model(model, embedding))
        found.append(step())
    assert not [name for name, _ in model.named_modules() if "lora" in name or "base_layer" in name]
    return found


@pytest.mark.daily("tp2")
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_shard_size": 2}], ids=["tp2", "shard2"])
def test_a_model_goes_on_after_an_adapter_that_does_not_fit(
    pools: Pools, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    start = _start(tmp_path / "start")
    wrong = tmp_path / "wrong"
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(start), _lora()).save_pretrained(wrong)
    file = wrong / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    tensors[name] = tensors[name][:, :-2].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    for first, *others in pools(2).run(_goes_on, start, str(wrong), sizes):
        assert first[1] > 0
        assert all(other == first for other in others)


def _types(
    start: str, sizes: dict[str, Any], changes: dict[str, Any]
) -> tuple[float, float, set[torch.dtype]]:
    model = _loaded(start, sizes, dtype="bfloat16")
    hfscale.get_peft_model(model, _lora(**changes), seed=0).train()
    rows = (
        BATCH
        if hfscale.batch_world(model) == 1
        else {key: rows[hfscale.batch_rank(model) :: 2] for key, rows in BATCH.items()}
    )
    loss = float(hfscale.train_step(model, rows))
    return (
        loss,
        float(hfscale.clip_grad_norm_(model, 1.0)),
        {p.dtype for p in model.parameters() if p.requires_grad},
    )


@pytest.mark.daily("copy")
@pytest.mark.parametrize(
    "changes", [{"modules_to_save": ["input_layernorm"]}, {"bias": "all"}], ids=["copy", "bias"]
)
def test_sixteen_and_thirty_two_bits_train_side_by_side(
    pools: Pools, tmp_path: Path, changes: dict[str, Any]
) -> None:
    start = _start(tmp_path, attention_bias=True)
    loss, norm, types = _types(start, {}, changes)
    assert types == {torch.bfloat16, torch.float32}
    for sharded_loss, sharded_norm, sharded_types in pools(2).run(
        _types, start, {"dp_shard_size": 2}, changes
    ):
        assert sharded_types == types
        assert sharded_loss == pytest.approx(loss, rel=1e-5)
        assert sharded_norm == pytest.approx(norm, rel=1e-2)


def _tied(start: str, changes: dict[str, Any]) -> str:
    model = hfscale.get_peft_model(_loaded(start, {"tp_size": 2}), _lora(**changes))
    message = _message(lambda: hfscale.merge_and_unload(model, quiet=True))
    hfscale.train_step(model.train(), BATCH)
    return message


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "changes", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}]
)
def test_one_of_two_tied_weights_is_not_merged(
    pools: Pools, tmp_path: Path, changes: dict[str, Any]
) -> None:
    start = _start(tmp_path, tie_word_embeddings=True)
    for message in pools(2).run(_tied, start, changes):
        assert "lm_head.weight and model.embed_tokens.weight are tied to one" in message


def test_what_was_left_out_of_all_linear(pools: Pools) -> None:
    """A saved adapter's config names the modules that were left out as well."""
    case = Case(tiny("llama"), peft=_lora(exclude_modules=r".*\.0\..*"))
    assert_layout_equal(case, ParallelConfig(tp_size=2), pools(2))


def _refused_layouts(start: str, mixture: str) -> list[str]:
    dense, sparse = _loaded(start, {"tp_size": 2}), _loaded(mixture, {"ep_size": 2})
    loha = LoHaConfig(r=3, target_modules=["q_proj"], rank_dropout=0.5)
    return [
        _message(lambda: hfscale.get_peft_model(dense, loha)),
        _message(
            lambda: hfscale.get_peft_model(
                sparse, _lora(target_modules=["q_proj"], modules_to_save=["mlp"])
            )
        ),
    ]


def test_what_would_crash_in_the_first_step_is_refused(pools: Pools, tmp_path: Path) -> None:
    start = _start(tmp_path / "start")
    AutoModelForCausalLM.from_config(qwen3_moe()).save_pretrained(tmp_path / "mixture")
    for dropout, copied in pools(2).run(_refused_layouts, start, str(tmp_path / "mixture")):
        assert "rank_dropout=...) draws random numbers by the size" in dropout
        assert "modules_to_save='mlp' is or contains model.layers.0.mlp" in copied


STOCK = {
    "lora": _lora(),
    "copy": _lora(modules_to_save=["lm_head"]),
    "tokens": peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"]),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "adaption": peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"),
}


def _by_stock_peft(start: str, sizes: dict[str, Any], kind: str) -> str:
    model = _loaded(start, sizes).train()
    message = _message(lambda: peft.get_peft_model(model, copy.deepcopy(STOCK[kind])))
    rows = BATCH["input_ids"].chunk(hfscale.batch_world(model))[hfscale.batch_rank(model)]
    hfscale.train_step(model, {"input_ids": rows, "labels": rows})  # it is as it was
    return message


@pytest.mark.parametrize("kind", STOCK)
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_shard_size": 2}], ids=["tp2", "shard2"])
def test_adapters_by_stock_peft_are_refused_over_ranks(
    pools: Pools, tmp_path: Path, sizes: dict[str, Any], kind: str
) -> None:
    for words in pools(2).run(_by_stock_peft, _start(tmp_path), sizes, kind):
        assert (
            "would treat this rank's shards as the full model: call hfscale.get_peft_model" in words
        )


def test_a_state_with_adapters_fits_no_model_without(tmp_path: Path) -> None:
    start = _start(tmp_path / "start")
    hfscale.save_state(hfscale.from_pretrained(start, peft_config=_lora()), tmp_path / "state")
    with pytest.raises(CheckpointError, match="as it was when saved, with its adapters"):
        hfscale.load_state(hfscale.from_pretrained(start), tmp_path / "state")


@pytest.mark.slow
def test_dora_beside_a_bias_that_ranks_have_copies_of(pools: Pools) -> None:
    """DoRA takes the bias out of what the projection returns, so it reads it by itself."""
    case = Case(tiny("llama", attention_bias=True), peft=_lora(use_dora=True, bias="all"))
    assert_layout_equal(case, ParallelConfig(tp_size=4), pools(4))


@pytest.mark.daily("lm_head")
@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`"
)
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_an_adapter_on_a_tied_embedding_in_stages(pools: Pools, target: str) -> None:
    """With the embedding PEFT saves its weight, and that of the head it is tied to, which another stage holds."""
    case = Case(
        tiny("llama", tie_word_embeddings=True), peft=_lora(target_modules=["embed_tokens", target])
    )
    assert_layout_equal(case, ParallelConfig(pp_size=2, num_microbatches=2), pools(2))
