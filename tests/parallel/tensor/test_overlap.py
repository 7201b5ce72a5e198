"""Backward collectives hidden behind weight gradients: the same bits, in another order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.testing import RankPool
from hfscale.train.runtime.shards import local_tensor
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]


def gradients(path: str, layout: dict[str, Any], frozen: str, checkpointing: bool) -> dict[str, Tensor | None]:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout)).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    if checkpointing:
        enable_checkpointing(model)
    ids = torch.arange(42).view(3, 14)
    hfscale.train_step(model, [{"input_ids": ids, "labels": ids}, {"input_ids": ids[:2], "labels": ids[:2]}])
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: None if grad is None else local_tensor(grad).clone() for name, grad in grads.items()}


@pytest.mark.daily("llama-layout5--False", "gpt2-layout1--True")
@pytest.mark.parametrize(
    ("layout", "frozen", "checkpointing"),
    [
        ({"tp_size": 2}, "", False),
        ({"tp_size": 2}, "", True),
        ({"tp_size": 2, "sequence_parallel": True}, "", False),
        ({"tp_size": 2, "sequence_parallel": True, "sequence_regather": True}, "", True),
        ({"tp_size": 2}, ".0.", False),
        ({"tp_size": 2, "dp_shard_size": 2}, "", False),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bit_equal(
    pools: Pools, tmp_path: Path, family: str, layout: dict[str, Any], frozen: str, checkpointing: bool
) -> None:
    changes = {"attention_bias": True} if family == "llama" else {}
    AutoModelForCausalLM.from_config(tiny(family, **changes), dtype=torch.float32).save_pretrained(tmp_path)
    pool = pools(ParallelConfig(**layout).total_size)
    late, plain = (
        pool.run(gradients, str(tmp_path), {**layout, "overlap": overlap}, frozen, checkpointing)
        for overlap in (True, False)
    )
    for found, expected in zip(late, plain, strict=True):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            other = found[name]
            assert (other is None) == (gradient is None), name
            assert gradient is None or torch.equal(gradient, other), name


class Log(TorchDispatchMode):
    """What backward does, in order: collectives by name, matrix products by the shape of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.events.append(func._schema.name.removeprefix("c10d::").strip("_"))
        elif func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.events.append(tuple(result.shape))
        return result


def backward_order(path: str, overlap: bool) -> list[Any]:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(tp_size=2, overlap=overlap)).train()
    ids = torch.arange(42).view(3, 14)
    loss = model(input_ids=ids, labels=ids).loss
    with Log() as log, torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    return log.events


def test_the_collective_starts_before_the_weight_gradients(pools: Pools, tmp_path: Path) -> None:
    config = tiny("llama", num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tokens, gate, query, keys = (42, 32), (25, 32), (16, 32), (8, 32)
    for events in pools(2).run(backward_order, str(tmp_path), True):
        mlp, attention = (index for index, event in enumerate(events) if event == "allreduce" and index > 1)
        assert events[mlp - 2 : mlp + 3] == [tokens, tokens, "allreduce", gate, gate]
        assert events[attention - 3 : attention + 1] == [tokens, tokens, tokens, "allreduce"]
        assert sorted(events[attention + 1 :]) == [keys, keys, query]
    for events in pools(2).run(backward_order, str(tmp_path), False):
        assert events[-1] == "allreduce"


def gathers_in_backward(path: str, layout: dict[str, Any]) -> int:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(tp_size=2, sequence_parallel=True, **layout)).train()
    ids = torch.arange(42).view(3, 14)
    loss = model(input_ids=ids, labels=ids).loss
    with Log() as log, torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    return sum("allgather" in event for event in log.events if isinstance(event, str))


def test_what_projections_read_is_gathered_again_once_for_all(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    kept = pools(2).run(gathers_in_backward, str(tmp_path), {})
    again = pools(2).run(gathers_in_backward, str(tmp_path), {"sequence_regather": True})
    assert [after - before for before, after in zip(kept, again, strict=True)] == [4, 4]  # two blocks in two layers
