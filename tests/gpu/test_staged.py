"""Two and four ranks on one GPU, over a group that stages through gloo: streams, exchanges, stages, ring, compression.

Each layout runs in float64 on the GPU and over gloo on the CPU; a second run on the GPU must give the same bits, since
a race gives others. NCCL refuses two ranks of one device, so this is as near as one GPU comes.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hfscale import MemoryConfig, ParallelConfig
from hfscale.testing import RankPool

from ..layouts import LAYOUTS
from ..parity.test_staged import BACKENDS, OTHERS, steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
_RECOMPUTED = {"memory": MemoryConfig(recompute=["self_attn"], offload_activations="1KB")}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        name: (sizes, {})
        for name, sizes in LAYOUTS.items()
        if name not in ("one", "cp2", "pipedream", "ep2", "ep2, tp2")
    },
    **{
        f"cp2 {method}": ({"cp_size": 2, "cp_method": method}, {})
        for method in ("gather", "ring", "heads")
    },
    "shard2, recomputed and offloaded": ({"dp_shard_size": 2}, _RECOMPUTED),
    "shard2, tp2": ({"dp_shard_size": 2, "tp_size": 2}, {}),
    **{name: case for name, case in OTHERS.items() if name != "fp8"},
}


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[str, int], RankPool]]:
    made: dict[tuple[str, int], RankPool] = {}

    def pool(backend: str, world: int) -> RankPool:
        return made.setdefault((backend, world), RankPool(world, backend=BACKENDS[backend]))

    yield pool
    for each in made.values():
        each.close()


def on_one_gpu(layout: dict[str, Any], built: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Return the device of the steps, and what they gave."""
    os.environ.pop("ACCELERATE_USE_CPU", None)  # the pool's own, for ranks on CPUs
    found = steps(layout, built)
    return found["losses"].device.type, {name: value.cpu() for name, value in found.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_ranks_on_cpus(
    pools: Callable[[int], RankPool],
    started: Callable[[str, int], RankPool],
    name: str,
    backend: str,
) -> None:
    layout, built = CASES[name]
    world = ParallelConfig(**layout).total_size
    wanted = pools(world).run(steps, layout, built)
    once, again = (started(backend, world).run(on_one_gpu, layout, built) for _ in range(2))
    for expected, (device, found), (_, repeated) in zip(wanted, once, again, strict=True):
        assert device == "cuda"
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            # Rotary tables are in float32, also in a float64 model, and a GPU's differ from a CPU's in the last digit,
            # which the orthogonal factors of PowerSGD, quotients of small columns, make larger.
            apart = (found[key] - value).nan_to_num().abs().max()
            assert (
                apart <= (1e-5 if "powersgd" in name else 1e-6) * value.nan_to_num().abs().max()
            ), key
            assert torch.equal(found[key].isnan(), value.isnan()), key
            assert torch.equal(found[key].nan_to_num(7.0), repeated[key].nan_to_num(7.0)), key
