"""Backward collectives hidden behind weight gradients: the same bits, in another order."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.replaced import attribute_replaced
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.distributed.ops import collectives, overlap
from hfscale.testing import RankPool
from hfscale.train.runtime.shards import local_tensor
from tests.tiny_models import tiny

Pools = Callable[[int], RankPool]
LORA = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def overlapped_from(size: int) -> AbstractContextManager[int]:
    """Overlap collectives of at least so many bytes; in the pools otherwise all."""
    return attribute_replaced(overlap, "OVERLAPPED_FROM", size)


def gradients(
    path: str,
    layout: dict[str, Any],
    frozen: str,
    checkpointing: bool,
    precision: str = "no",
    size: int = 0,
    adapters: bool = False,
) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = hfscale.from_pretrained(
        path,
        parallel=ParallelConfig(**layout),
        mixed_precision=precision,
        peft_config=LORA if adapters else None,
    ).train()
    for name, parameter in model.named_parameters():
        if frozen:
            parameter.requires_grad_(frozen not in name)
    if checkpointing:
        enable_checkpointing(model)
    ids = torch.arange(39).view(3, 13)
    with overlapped_from(size):
        hfscale.train_step(
            model, [{"input_ids": ids, "labels": ids}, {"input_ids": ids[:2], "labels": ids[:2]}]
        )
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {
        name: None if grad is None else local_tensor(grad).clone() for name, grad in grads.items()
    }


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
    pools: Pools,
    tmp_path: Path,
    family: str,
    layout: dict[str, Any],
    frozen: str,
    checkpointing: bool,
) -> None:
    changes = {"attention_bias": True} if family == "llama" else {}
    AutoModelForCausalLM.from_config(tiny(family, **changes), dtype=torch.float32).save_pretrained(
        tmp_path
    )
    pool = pools(ParallelConfig(**layout).total_size)
    late, plain = (
        pool.run(gradients, str(tmp_path), {**layout, "overlap": overlap}, frozen, checkpointing)
        for overlap in (True, False)
    )
    same_bits(late, plain)


def same_bits(late: list[dict[str, Tensor | None]], plain: list[dict[str, Tensor | None]]) -> None:
    for found, expected in zip(late, plain, strict=True):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            other = found[name]
            assert (other is None) == (gradient is None), name
            assert gradient is None or torch.equal(gradient, other), name


@pytest.mark.daily("fp8-layout0", "bf16-layout1", "no-layout1")
@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 2},
        {"tp_size": 2, "sequence_parallel": True},
        {"tp_size": 2, "pp_size": 2, "pipeline_schedule": "interleaved_zero_bubble"},
    ],
)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp8"])
def test_small_messages_have_the_same_bits(
    pools: Pools, tmp_path: Path, layout: dict[str, Any], precision: str
) -> None:
    """The second microbatch is the smaller one: one step takes both ways."""
    wide = {"hidden_size": 64, "intermediate_size": 64} if precision == "fp8" else {}
    config = tiny("llama", **wide, **({"num_hidden_layers": 4} if "pp_size" in layout else {}))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    between = 3 * 13 * config.hidden_size * 4
    late, both, small = (
        pools(ParallelConfig(**layout).total_size).run(
            gradients, str(tmp_path), layout, "", False, precision, size
        )
        for size in (0, between, 1 << 20)
    )
    same_bits(late, small)
    same_bits(late, both)


@pytest.mark.daily("no-layout1-True", "bf16-layout4-False")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 2},
        {"tp_size": 2, "sequence_parallel": True},
        {"tp_size": 2, "dp_shard_size": 2},
        {"tp_size": 2, "sequence_parallel": True, "sequence_regather": True},
        {"tp_size": 2, "pp_size": 2, "pipeline_schedule": "interleaved_zero_bubble"},
    ],
)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_adapters_have_the_same_bits(
    pools: Pools, tmp_path: Path, layout: dict[str, Any], precision: str, checkpointing: bool
) -> None:
    """The second microbatch is the smaller one: one step takes both ways."""
    config = tiny("llama", **({"num_hidden_layers": 4} if "pp_size" in layout else {}))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    between = 3 * 13 * config.hidden_size * (4 if precision == "no" else 2)
    late, both, small = (
        pools(ParallelConfig(**layout).total_size).run(
            gradients, str(tmp_path), layout, "", checkpointing, precision, size, True
        )
        for size in (0, between, 1 << 20)
    )
    factors = [found for rank in late for name, found in rank.items() if "lora" in name]
    assert factors
    assert all(found is None or found.count_nonzero() for found in factors)
    same_bits(late, small)
    same_bits(both, small)


def test_context_ranks_with_uneven_tokens_ask_for_scales_alike(
    pools: Pools, tmp_path: Path
) -> None:
    """Of 13 tokens one rank has 6 and the other 7: the limit is between their bytes."""
    config = tiny("llama", hidden_size=64, intermediate_size=64)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    layout = {"tp_size": 2, "cp_size": 2}
    between = 3 * 7 * config.hidden_size * 4
    late, uneven = (
        pools(4).run(gradients, str(tmp_path), layout, "", False, "fp8", size)
        for size in (0, between)
    )
    same_bits(late, uneven)


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


def backward_order(
    path: str, tokens: int = 14, size: int = 0, adapters: bool = False, **layout: Any
) -> list[Any]:
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(tp_size=2, **layout), peft_config=LORA if adapters else None
    ).train()
    ids = torch.arange(3 * tokens).view(3, tokens)
    log = Log()
    alone = torch.autograd.set_multithreading_enabled(False)
    if adapters:  # in a plain loop, adapters compute nothing later
        with overlapped_from(size), log, alone:
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        return log.events
    with overlapped_from(size):
        loss = model(input_ids=ids, labels=ids).loss
    with log, alone:
        loss.backward()
    return log.events


def test_the_collective_starts_before_the_weight_gradients(pools: Pools, tmp_path: Path) -> None:
    config = tiny("llama", num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tokens = (42, 32)
    gate = (25, 32)
    query = (16, 32)
    keys = (8, 32)
    for events in pools(2).run(backward_order, str(tmp_path)):
        mlp, attention = (
            index for index, event in enumerate(events) if event == "allreduce" and index > 1
        )
        assert events[mlp - 2 : mlp + 3] == [tokens, tokens, "allreduce", gate, gate]
        assert events[attention - 3 : attention + 1] == [tokens, tokens, tokens, "allreduce"]
        assert sorted(events[attention + 1 :]) == [keys, keys, query]
    for how in ({"overlap": False}, {"size": 3 * 14 * 32 * 4 + 1}):
        for events in pools(2).run(backward_order, str(tmp_path), **how):
            assert events[-1] == "allreduce"


def test_the_collective_of_a_frozen_block_runs_under_its_adapters(
    pools: Pools, tmp_path: Path
) -> None:
    """Both factors' gradients of gate and up, and of q, k and v, come right after their block's collective started."""
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    first = (3, 32)
    of_mlp = [first] * 2 + [(25, 3)] * 2
    of_attention = [first] * 3 + [(8, 3)] * 2 + [(16, 3)]
    limit = 3 * 14 * 32 * 4
    for size, deferred in ((limit, True), (limit + 1, False)):
        for events in pools(2).run(backward_order, str(tmp_path), size=size, adapters=True):
            starts = [index for index, event in enumerate(events) if event == "allreduce"]
            behind = [
                list(takewhile(lambda event: isinstance(event, tuple), events[start + 1 :]))
                for start in starts
            ]
            for factors in (of_mlp, of_attention):
                found = [sorted(each[: len(factors)]) == sorted(factors) for each in behind]
                assert any(found) == deferred


@pytest.mark.parametrize("more", [0, 1])
def test_ranks_with_uneven_tokens_decide_alike(pools: Pools, tmp_path: Path, more: int) -> None:
    AutoModelForCausalLM.from_config(
        tiny("llama", num_hidden_layers=1), dtype=torch.float32
    ).save_pretrained(tmp_path)
    size = 3 * 13 * 32 * 4 + more
    for events in pools(2).run(
        backward_order, str(tmp_path), tokens=13, size=size, sequence_parallel=True
    ):
        last_sum = max(index for index, event in enumerate(events) if event == "alltoall_base")
        weights = [event for event in events[last_sum:] if isinstance(event, tuple)]
        assert sorted(weights) == ([] if more else [(8, 32), (8, 32), (16, 32)])


def copies(path: str, size: int, checkpointing: bool, adapters: bool) -> int:
    """Copies of tensors before they are summed, in a step."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(tp_size=2), peft_config=LORA if adapters else None
    ).train()
    if checkpointing:
        enable_checkpointing(model)
    ids = torch.arange(39).view(3, 13)
    with (
        overlapped_from(size),
        mock.patch.object(collectives, "_copied", wraps=collectives._copied) as made,
    ):
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return made.call_count


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("size", "checkpointing", "adapters"),
    [(0, False, False), (1 << 20, False, False), (0, True, False), (0, False, True)],
)
def test_what_is_summed_is_not_copied_before(
    pools: Pools, tmp_path: Path, family: str, size: int, checkpointing: bool, adapters: bool
) -> None:
    """But for a frozen embedding's rows, which have no gradient: two layers made 10 copies, 8 of them in blocks."""
    AutoModelForCausalLM.from_config(tiny(family), dtype=torch.float32).save_pretrained(tmp_path)
    found = pools(2).run(copies, str(tmp_path), size, checkpointing, adapters)
    assert found == [int(adapters)] * 2


def gathers_in_backward(path: str, layout: dict[str, Any]) -> int:
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(tp_size=2, sequence_parallel=True, **layout)
    ).train()
    ids = torch.arange(42).view(3, 14)
    loss = model(input_ids=ids, labels=ids).loss
    with Log() as log, torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    return sum("allgather" in event for event in log.events if isinstance(event, str))


def test_what_projections_read_is_gathered_again_once_for_all(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(tmp_path)
    kept = pools(2).run(gathers_in_backward, str(tmp_path), {})
    again = pools(2).run(gathers_in_backward, str(tmp_path), {"sequence_regather": True})
    # Two blocks in two layers.
    assert [after - before for before, after in zip(kept, again, strict=True)] == [
        4,
        4,
    ]
