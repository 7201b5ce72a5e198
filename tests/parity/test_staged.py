"""Layouts over a backend that is not gloo equal one process: the branches that NCCL takes, on a CPU."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.distributed.processes import backend_of
from hfscale.testing import Case, RankPool, assert_layout_equal
from hfscale.train.runtime import local_tensor, runtime_of

from ..layouts import LAYOUTS
from ..mixtures import EAGER, qwen3_moe
from ..staged import late, staged
from ..sweeps import pairs
from ..tiny_models import tiny

BACKENDS = {"staged": staged, "late": late}
_MORE = {
    **{
        f"cp2 {method}": {"cp_size": 2, "cp_method": method}
        for method in ("gather", "ring", "heads")
    },
    "replicate2": {"dp_replicate_size": 2},
}
EVERY = {
    **{name: sizes for name, sizes in LAYOUTS.items() if name not in ("one", "cp2", "pipedream")},
    **_MORE,
}


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[str, int], RankPool]]:
    made: dict[tuple[str, int], RankPool] = {}

    def pool(backend: str, world: int) -> RankPool:
        return made.setdefault((backend, world), RankPool(world, backend=BACKENDS[backend]))

    yield pool
    for each in made.values():
        each.close()


@pytest.mark.daily("sequence-late", "1f1b-late")
@pytest.mark.parametrize(
    ("layout", "backend"),
    pairs(
        EVERY,
        BACKENDS,
        daily=[
            (layout, "late") for layout in ("tp2", "sequence", "cp2 ring", "ep2", "1f1b", "shard2")
        ],
    ),
)
def test_equal_to_one_process(
    started: Callable[[str, int], RankPool], layout: str, backend: str
) -> None:
    parallel = ParallelConfig(**EVERY[layout])
    mixture = "ep2" in layout
    config = (
        qwen3_moe(num_hidden_layers=2)
        if mixture
        else tiny("llama", num_hidden_layers=2 * parallel.pp_size)
    )
    case = Case(config, accumulation=2, hf_kwargs=dict(EAGER) if mixture else {})
    pool = started(backend, parallel.total_size)
    assert_layout_equal(case, parallel, pool)
    assert pool.run(carriers) == [(backend, "")] * parallel.total_size


def carriers() -> tuple[str, str]:
    """What carries tensors, by torch and by hfscale, which asks whether it is gloo."""
    world = dist.group.WORLD
    assert world is not None
    return dist.get_backend(world), backend_of(world, torch.device("cpu"))


POWERSGD = {"dp_replicate_size": 2, "gradient_compression": "powersgd", "powersgd_rank": 2}
# What one process does not compute, or not so: over gloo they are compared elsewhere.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "powersgd": (POWERSGD, {}),
    "bf16": ({**POWERSGD, "gradient_compression": "bf16", "powersgd_rank": None}, {}),
    "shard2, powersgd": ({**POWERSGD, "dp_shard_size": 2}, {}),
    "offload": (
        {"dp_shard_size": 2},
        {"memory": MemoryConfig(offload_parameters=True, offload_activations="1KB")},
    ),
    "pipedream": (LAYOUTS["pipedream"], {}),  # which reports a loss one call later
    "fp8": ({"tp_size": 2, "sequence_parallel": True}, {"mixed_precision": "fp8"}),
}


def steps(layout: dict[str, Any], built: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Losses and gradients of two steps, the second adding to the first."""
    parallel = ParallelConfig(**layout)
    config = tiny("llama", num_hidden_layers=2 * parallel.pp_size)
    model = hfscale.from_config(config, parallel=parallel, dtype=torch.float64, **built).train()
    generator = torch.Generator().manual_seed(hfscale.batch_rank(model))
    ids = torch.randint(3, 60, (2, 2, 12), generator=generator)
    losses = [hfscale.train_step(model, {"input_ids": one, "labels": one}) for one in ids]
    return {
        "losses": torch.stack(losses),
        **{
            p.name: local_tensor(x.grad).clone()
            for p, x in runtime_of(model).parameters()
            if x.grad is not None
        },
    }


@pytest.mark.parametrize(
    ("name", "backend"), pairs(OTHERS, BACKENDS, daily=[("powersgd", "late"), ("offload", "late")])
)
def test_equal_to_gloo(
    pools: Callable[[int], RankPool],
    started: Callable[[str, int], RankPool],
    name: str,
    backend: str,
) -> None:
    layout, built = OTHERS[name]
    world = ParallelConfig(**layout).total_size
    for wanted, found in zip(
        pools(world).run(steps, layout, built),
        started(backend, world).run(steps, layout, built),
        strict=True,
    ):
        assert wanted.keys() == found.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12, equal_nan=True)


def early() -> tuple[float, float]:
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    before = float(x.sum())
    work.wait()
    return before, float(x.sum())


def test_late_outputs_are_nan_until_they_are_waited_for(
    started: Callable[[str, int], RankPool],
) -> None:
    for before, after in started("late", 2).run(early):
        assert math.isnan(before)
        assert after == 6
