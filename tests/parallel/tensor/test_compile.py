"""Layers that are compiled: collectives are part of their graphs, and results are what they were."""

from collections.abc import Callable

import pytest
import torch

import hfscale
from hfscale import ParallelConfig
from hfscale.runtime import runtime_of
from hfscale.testing import RankPool
from tests.models import tiny

Pools = Callable[[int], RankPool]


def _step(family: str, layout: ParallelConfig, compiled: bool, whole: bool) -> dict[str, torch.Tensor]:
    model = hfscale.from_config(tiny(family), parallel=layout, dtype=torch.float64).train()
    torch.compiler.reset()
    for name in runtime_of(model).plan.layers if compiled else ():
        layer = model.get_submodule(name)
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=whole)
    ids = torch.arange(24).view(2, 12)
    loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    torch.compiler.reset()
    return {"loss": loss, **{p.name: x.grad for p, x in runtime_of(model).parameters() if x.grad is not None}}


@pytest.mark.parametrize(
    ("family", "sequence", "whole"),
    # The stream of sequence parallelism asks whether it is recomputed, which breaks the graph.
    [("llama", False, True), ("gpt2", False, True), ("llama", True, False)],
)
def test_a_compiled_layer(pools: Pools, family: str, sequence: bool, whole: bool) -> None:
    layout = ParallelConfig(tp_size=2, sequence_parallel=sequence)
    plain, compiled = (pools(2).run(_step, family, layout, how, whole) for how in (False, True))
    for expected, found in zip(plain, compiled, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
