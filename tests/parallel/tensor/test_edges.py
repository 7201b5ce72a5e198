"""What users do besides the plain loop: it is right, or it is refused; it is never silently something else."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.testing import RankPool
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]
TP: dict[str, Any] = {"tp_size": 2}
CUT: dict[str, Any] = {"tp_size": 2, "sequence_parallel": True}
IDS = torch.arange(20).view(2, 10)


def load(path: str, layout: dict[str, Any], **kwargs: Any) -> Any:
    return hfscale.from_pretrained(
        path, parallel=ParallelConfig(**layout), dtype=torch.float64, **kwargs
    ).train()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64).save_pretrained(path)
    return str(path)


def positional(path: str, layout: dict[str, Any]) -> tuple[float, float]:
    model = load(path, layout)
    return model(input_ids=IDS, labels=IDS).loss.item(), model(
        IDS, None, None, None, None, IDS
    ).loss.item()


def test_labels_by_position(pools: Pools, llama: str) -> None:
    for named, by_position in pools(2).run(positional, llama, TP):
        assert named == by_position


def test_a_deep_copy_is_a_copy(llama: str) -> None:
    model = load(llama, {}).eval()
    reference = copy.deepcopy(model)
    before = reference(input_ids=IDS).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(reference(input_ids=IDS).logits, before)
    reference.train()
    hfscale.train_step(reference, {"input_ids": IDS, "labels": IDS})
    assert all(parameter.grad is None for parameter in model.parameters())


def second_order(path: str, layout: dict[str, Any]) -> str:
    model = load(path, layout, attn_implementation="eager")
    loss = model(input_ids=IDS).logits.square().mean()
    gradients = torch.autograd.grad(loss, list(model.model.norm.parameters()), create_graph=True)
    try:
        sum(gradient.square().sum() for gradient in gradients).backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", [TP, CUT])
def test_second_order_gradients_are_refused(
    pools: Pools, llama: str, layout: dict[str, Any]
) -> None:
    assert all(
        "once_differentiable" in message for message in pools(2).run(second_order, llama, layout)
    )


def detached(path: str, layout: dict[str, Any]) -> list[str]:
    model = load(path, layout)
    hidden = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    model.lm_head(hidden.detach()).square().mean().backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is not None]


def test_a_detached_stream_trains_the_head_alone(pools: Pools, llama: str) -> None:
    assert pools(2).run(detached, llama, CUT) == [["lm_head.weight"]] * 2


def masks_after_resuming(path: str, layout: dict[str, Any], directory: str) -> Tensor:
    model = load(path, layout)
    torch.manual_seed(100 + torch.distributed.get_rank())
    hfscale.save_state(model, directory)
    hfscale.load_state(model, directory)
    return embedding_mask(model)


def embedding_mask(model: Any) -> Tensor:
    seen: list[Tensor] = []
    handle = model.transformer.drop.register_forward_hook(
        lambda _, args, output: seen.append(output != 0)
    )
    hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    handle.remove()
    return seen[0]


def masks_after_an_exception(path: str, layout: dict[str, Any]) -> tuple[Tensor, bool]:
    model = load(path, layout)
    hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    before = {name: p.grad.clone() for name, p in model.named_parameters()}

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = model.transformer.h[1].attn.c_attn.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    handle.remove()
    kept = all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    return embedding_mask(model), kept


@pytest.mark.parametrize("layout", [TP, CUT])
def test_streams_survive(pools: Pools, tmp_path: Path, layout: dict[str, Any]) -> None:
    config = tiny("gpt2", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(
        tmp_path / "model"
    )
    path = str(tmp_path / "model")
    first, second = pools(2).run(masks_after_resuming, path, layout, str(tmp_path / "state"))
    assert torch.equal(first, second)
    (first, kept), (second, also_kept) = pools(2).run(masks_after_an_exception, path, layout)
    assert torch.equal(first, second)
    assert kept
    assert also_kept


def optimizer_in_backward(path: str, layout: dict[str, Any]) -> Tensor:
    model = load(path, layout)
    optimizers = {
        parameter: torch.optim.AdamW([parameter], lr=0.1) for parameter in model.parameters()
    }

    def update(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    return model.model.norm.weight.detach()


def test_an_optimizer_that_steps_in_backward_sees_whole_gradients(pools: Pools, llama: str) -> None:
    first, second = pools(2).run(optimizer_in_backward, llama, CUT)
    assert torch.equal(first, second)


def hooked_embedding(path: str, layout: dict[str, Any]) -> float:
    model = load(path, layout)
    model.get_input_embeddings().register_forward_hook(lambda _, args, output: output + 0.1)
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss.item()


def test_what_a_hook_adds_to_the_embedding_counts_once(pools: Pools, llama: str) -> None:
    expected = hooked_embedding(llama, {})
    assert pools(2).run(hooked_embedding, llama, CUT) == pytest.approx([expected] * 2, rel=1e-6)


def recomputed_whole(path: str, layout: dict[str, Any]) -> dict[str, Tensor]:
    model = load(path, layout)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def loss(factor: Tensor) -> Tensor:
        return model(input_ids=IDS, labels=IDS, use_cache=False).loss * factor

    checkpoint(loss, scale, use_reentrant=True).backward()
    return {name: p.grad for name, p in model.named_parameters() if "norm" in name}


def test_the_whole_model_recomputed(pools: Pools, llama: str) -> None:
    expected = recomputed_whole(llama, {})
    for found in pools(2).run(recomputed_whole, llama, CUT):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("layout", [{}, TP])
def test_tokens_outside_of_the_vocabulary(pools: Pools, llama: str, layout: dict[str, Any]) -> None:
    run = pools(2).run if layout else lambda function, *args: [function(*args)]
    assert run(outside, llama, layout)


def outside(path: str, layout: dict[str, Any]) -> bool:
    model = load(path, layout)
    wrong = [{"input_ids": IDS, "labels": IDS.masked_fill(IDS == 5, label)} for label in (67, -1)]
    if layout:
        wrong.append({"input_ids": IDS.masked_fill(IDS == 5, 67), "labels": IDS})
    for batch in wrong:
        with pytest.raises(ConfigError, match="outside of the vocabulary of 67"):
            hfscale.train_step(model, batch)
    return True


def two_recomputed(path: str, layout: dict[str, Any], reentrant: bool) -> dict[str, Tensor]:
    model = load(path, layout)
    enable_checkpointing(model, use_reentrant=reentrant)
    batches = [torch.arange(length)[None] for length in (13, 14, 13)]
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in batches]
    with torch.no_grad():
        model(input_ids=batches[1])
    (losses[0] + 2 * losses[1] + 3 * losses[2]).backward()
    return {name: p.grad for name, p in model.named_parameters() if "norm" in name}


# of reentrant checkpoints in the evaluation, in older transformers
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_passes_whose_shards_are_as_long(
    pools: Pools, llama: str, reentrant: bool
) -> None:
    expected = two_recomputed(llama, {}, reentrant)
    for found in pools(2).run(two_recomputed, llama, CUT, reentrant):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)


def bert_step(layout: dict[str, Any]) -> float:
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=67,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    model = hfscale.from_config(
        config, parallel=ParallelConfig(**layout), auto_class=AutoModelForSequenceClassification
    ).train()
    loss = model(input_ids=IDS, labels=torch.tensor([0, 1])).loss
    loss.backward()
    return loss.item()


def test_an_encoder_with_dropout(pools: Pools) -> None:
    first, second = pools(2).run(bert_step, CUT)
    assert first == second
