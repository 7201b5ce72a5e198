"""Mixed precision in stages: microbatches under way share one copy of each weight, and nothing else changes by it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.extras.asynchronous import pipeline as asynchronous
from hfscale.features.memory.saved import count_saved
from hfscale.features.precision.part import ParameterCasts
from hfscale.testing import RankPool
from hfscale.train.runtime import local_tensor, runtime_of

from ...mixtures import qwen3_moe
from ...sweeps import cases
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
PP: dict[str, Any] = {"pp_size": 2, "num_microbatches": 4}
LORA: dict[str, Any] = {
    "r": 4,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
    "lora_dropout": 0.1,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b": ({}, {}),
    "zbv": ({"pipeline_schedule": "zbv"}, {"lora": LORA, "sizes": {"num_hidden_layers": 4}}),
    "frozen": ({}, {"frozen": "q_proj"}),
    "2bw": ({"pipeline_schedule": "pipedream_2bw"}, {}),
    "pipedream": ({"pipeline_schedule": "pipedream", "num_microbatches": None}, {}),
    "recomputed": ({}, {"memory": {"recompute": ["mlp"]}}),
    "reentrant": ({}, {"reentrant": True}),
    "compressed": ({}, {"memory": {"compress_activations": "64"}}),
    "offloaded": ({}, {"memory": {"offload_activations": "64"}}),
    "fp16": ({}, {"mixed_precision": "fp16"}),
    "fp8": ({}, {"mixed_precision": "fp8"}),
    "gpt2": ({}, {"family": "gpt2"}),
    "mixture": ({}, {"config": qwen3_moe}),
    "tp2": ({"tp_size": 2, "sequence_parallel": True, "sequence_regather": True}, {}),
    "cp2": ({"cp_size": 2}, {}),
}


@contextmanager
def apart() -> Iterator[None]:
    """Within: each microbatch has copies of its own."""

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    with ExitStack() as stack:
        stack.enter_context(patch.object(ParameterCasts, "is_needed", lambda *_: False))
        stack.enter_context(patch.object(asynchronous, "sharing", nothing))
        yield


def trained(
    layout: dict[str, Any], asked: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of two steps and of evaluations between them, gradients and weights, and the most bytes kept."""
    torch.manual_seed(0)
    asked = dict(asked)
    lora, frozen, reentrant = (asked.pop(name, None) for name in ("lora", "frozen", "reentrant"))
    model = hfscale.from_config(
        asked.pop("config", partial(tiny, asked.pop("family", "llama")))(**asked.pop("sizes", {})),
        parallel=ParallelConfig(**{**PP, **layout}),
        dtype=torch.float32,
        peft_config=lora and LoraConfig(**lora),
        memory=MemoryConfig(**asked.pop("memory", {})),
        **{"mixed_precision": "bf16", **asked},
    ).train()
    if reentrant:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    runtime = runtime_of(model)
    optimizer = hfscale.create_optimizer(model, "sgd", lr=1e-2)
    for planned, parameter in runtime.parameters():
        if frozen is not None and frozen in planned.name:
            parameter.requires_grad_(False)
    ids = torch.randint(
        3,
        60,
        (layout.get("num_microbatches", 4) or 1, 11),
        generator=torch.Generator().manual_seed(0),
    )
    batch = {"input_ids": ids, "labels": ids}
    losses = []
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        for _ in range(3):
            optimizer.zero_grad()
            losses += [float(hfscale.train_step(model, batch))]
            optimizer.step()
            losses += [float(hfscale.eval_step(model, batch))]
    held = {planned.name: parameter for planned, parameter in runtime.parameters()}
    found = {
        f"{name}.grad": local_tensor(p.grad).clone()
        for name, p in held.items()
        if p.grad is not None
    }
    found |= {name: local_tensor(p.detach()).clone() for name, p in held.items()}
    return [loss for loss in losses if loss == loss], found, saved.total


def both(*case: Any) -> tuple[Any, Any]:
    """With copies shared, and without."""
    shared = trained(*case)
    with apart():
        return shared, trained(*case)


@pytest.mark.daily("1f1b", "2bw")
@pytest.mark.parametrize("case", cases(CASES, daily=["1f1b", "zbv", "2bw"]))
def test_sharing_changes_no_bit(pools: Pools, case: str) -> None:
    layout, asked = CASES[case]
    ranks = ParallelConfig(**{**PP, **layout}).total_size
    for (losses, found, _), (expected, wanted, _) in pools(ranks).run(both, layout, asked):
        assert losses == expected
        assert found.keys() == wanted.keys()
        assert not [name for name, value in found.items() if not torch.equal(value, wanted[name])]


def kept(microbatches: int, tp_size: int, trains: bool) -> tuple[int, int, int]:
    """Bytes that layers keep under GPipe, those that are estimated, and those of one copy of the weights."""
    layout = {
        "pp_size": 2,
        "num_microbatches": microbatches,
        "pipeline_schedule": "gpipe",
        "tp_size": tp_size,
    }
    model = hfscale.from_config(
        tiny("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=4),
        parallel=ParallelConfig(**layout),
        dtype=torch.float32,
        mixed_precision="bf16",
        attn_implementation="sdpa",
    ).train()
    runtime = runtime_of(model)
    for planned, parameter in runtime.parameters():
        parameter.requires_grad_(trains or "norm" in planned.name)
    ids = torch.randint(3, 60, (2 * microbatches, 16), generator=torch.Generator().manual_seed(0))
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    found = hfscale.memory_estimate(model, tokens=32)
    head = [
        2 * p.numel() for planned, p in runtime.parameters() if planned.name == "lm_head.weight"
    ]
    copies = sum(2 * p.numel() for planned, p in runtime.parameters() if "proj" in planned.name)
    return saved.layers + saved.around, found.activations + found.gathered - sum(head), copies


@pytest.mark.daily("whole", "frozen")
@pytest.mark.parametrize(
    ("tp_size", "trains"), [(1, True), (1, False), (2, True)], ids=["whole", "frozen", "tp2"]
)
def test_copies_do_not_grow_with_microbatches(pools: Pools, tp_size: int, trains: bool) -> None:
    """Six under way keep what one keeps six times, but for one copy of the weights."""
    pool = pools(2 * tp_size)
    for (one, _, _), (six, estimated, copies) in zip(
        pool.run(kept, 1, tp_size, trains), pool.run(kept, 6, tp_size, trains), strict=True
    ):
        assert six == pytest.approx(6 * (one - copies) + copies, rel=0.01)
        assert not trains or six == pytest.approx(estimated, rel=0.03)
