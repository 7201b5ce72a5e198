"""Layers that are compiled: collectives are part of their graphs, and results are what they were."""

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig
from torch._inductor import config as inductor

import hfscale
from hfscale import ParallelConfig
from hfscale.runtime import runtime_of
from hfscale.testing import RankPool
from tests.models import tiny

Pools = Callable[[int], RankPool]


def _step(
    family: str, layout: ParallelConfig, compiled: bool, whole: bool, backend: str = "aot_eager", blocks: bool = False
) -> dict[str, torch.Tensor]:
    lora = LoraConfig(r=2, target_modules="all-linear") if blocks else None
    config = tiny(family, num_hidden_layers=1) if blocks else tiny(family)
    torch.manual_seed(0)
    model = hfscale.from_config(config, parallel=layout, dtype=torch.float64, peft_config=lora).train()
    torch.compiler.reset()
    inductor.compile_threads = 1  # of a pool's rank, which starts no processes
    plan = runtime_of(model).plan
    inside = [f"{layer}.{block}" for layer in plan.layers for block in ("self_attn", "mlp")]
    for name in (inside if blocks else plan.layers) if compiled else ():
        module = runtime_of(model).model.get_submodule(name)
        module.forward = torch.compile(module.forward, backend=backend, fullgraph=whole)
    ids = torch.arange(24).view(2, 12)
    loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    torch.compiler.reset()
    return {"loss": loss, **{p.name: x.grad for p, x in runtime_of(model).parameters() if x.grad is not None}}


def check(plain: list[dict[str, torch.Tensor]], compiled: list[dict[str, torch.Tensor]]) -> None:
    for expected, found in zip(plain, compiled, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("family", "sequence", "whole"),
    # The stream of sequence parallelism asks whether it is recomputed, which breaks the graph.
    [pytest.param("llama", False, True, marks=pytest.mark.slow), ("gpt2", False, True), ("llama", True, False)],
)
def test_a_compiled_layer(pools: Pools, family: str, sequence: bool, whole: bool) -> None:
    layout = ParallelConfig(tp_size=2, sequence_parallel=sequence)
    check(*(pools(2).run(_step, family, layout, how, whole) for how in (False, True)))


@pytest.mark.slow
def test_compiled_blocks(pools: Pools) -> None:
    """By torch's own compiler, for this machine's processor, with adapters inside: a block has no collective in it."""
    layout, run = ParallelConfig(tp_size=2, sequence_parallel=True), pools(2).run
    check(*(run(_step, "llama", layout, how, True, "inductor", True) for how in (False, True)))
