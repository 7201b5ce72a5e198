"""The update of shards is that of one process by stock classes (traps T6, T22), over several steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hfscale import ParallelConfig
from hfscale.testing import RankPool

from .cases import CONFIGS, differences, expected

Pools = Callable[[int], RankPool]
F32 = torch.float32
F64 = torch.float64
BF16 = torch.bfloat16
BY_ENTRY = [
    ("adamw_torch", F32), ("adamw_torch_fused", F64), ("sgd", F32), ("adagrad", F32), ("rmsprop", F32),
    ("lion_32bit", F32), ("ademamix", F32), ("rmsprop_bnb", F32), ("paged_adamw_32bit", F32),
]  # fmt: skip
BY_BLOCK = [
    (name, F32)
    for name in (
        "adamw_8bit",
        "adam_8bit",
        "lion_8bit",
        "ademamix_8bit",
        "rmsprop_bnb_8bit",
        "paged_adamw_8bit",
    )
]
EXACT = [*BY_ENTRY, *BY_BLOCK, ("muon", F64), ("adamw_torch", BF16), ("adamw_8bit", BF16)]


def exact(kind: str) -> list[tuple[str, torch.dtype]]:
    """Muon also over stacks and fused matrices, each by itself."""
    return [*EXACT, (f"muon_whole {kind}", F64)]


ROUNDED = {
    ("adafactor", F64): 1e-13,
    ("adamw_torch_fused", F32): 2e-7,
    ("adafactor", F32): 2e-6,
    ("adafactor", BF16): 2**-7,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "shard2": {"dp_shard_size": 2},
    "pp2": {"pp_size": 2},
    "replicate2": {"dp_replicate_size": 2},
    "ep2": {"ep_size": 2},
    "ep2 of shard2": {"ep_size": 2, "dp_shard_size": 2},
    "tp4": {"tp_size": 4},
    "shard4": {"dp_shard_size": 4},
    "tp2, shard2": {"tp_size": 2, "dp_shard_size": 2},
    "pp2, tp2": {"pp_size": 2, "tp_size": 2},
    "ep2, shard4": {"ep_size": 2, "dp_shard_size": 4},
    "ep2, tp2": {"ep_size": 2, "tp_size": 2},
    "ep2, tp2 of both": {"ep_size": 2, "tp_size": 2, "expert_tp_size": 2},
}
ON: dict[str, tuple[str, ...]] = {
    "ragged": ("tp2", "replicate2", "shard4", "tp2, shard2", "pp2, tp2"),
    "fused": ("tp2", "shard2", "pp2", "tp2, shard2", "pp2, tp2"),
    "rows": ("tp2", "shard2", "tp4", "tp2, shard2"),
    "experts": ("ep2, tp2", "ep2, tp2 of both", "ep2, shard4"),
    "biased_experts": ("ep2, shard4",),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("references")

    def of(kind: str) -> Path:
        path = directory / f"{kind}.pt"
        if not path.exists():
            torch.save(expected(kind, [*exact(kind), *ROUNDED]), path)
        return path

    return of


SLOW = [
    ("experts", "ep2, tp2 of both"),
    ("experts", "ep2, shard4"),
    ("ragged", "tp2, shard2"),
    ("fused", "tp2, shard2"),
    ("fused", "pp2, tp2"),
    ("rows", "tp4"),
    ("rows", "tp2, shard2"),
    ("ragged", "shard4"),
]


@pytest.mark.daily("ragged-pp2, tp2", "fused-shard2")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=pytest.mark.slow if (kind, layout) in SLOW else [])
        for kind in CONFIGS
        for layout in ON[kind]
    ],
)
def test_update_of_one_process(
    pools: Pools, stored: Callable[[str], Path], kind: str, layout: str
) -> None:
    sizes = LAYOUTS[layout]
    pool = pools(ParallelConfig(**sizes).total_size)
    for found in pool.run(differences, sizes, kind, [*exact(kind), *ROUNDED], str(stored(kind))):
        wrong = {case: found[case] for case in exact(kind) if found[case]}
        wrong |= {
            case: found[case] for case, tolerance in ROUNDED.items() if found[case] > tolerance
        }
        assert not wrong


def test_update_of_one_process_in_one_process(stored: Callable[[str], Path]) -> None:
    with pytest.warns(UserWarning, match="its states are not paged|keeps no float32 copy"):
        found = differences({}, "ragged", [*exact("ragged"), *ROUNDED], str(stored("ragged")))
    assert {name for (name, _), difference in found.items() if difference} <= {"adafactor"}
    assert all(found[case] <= tolerance for case, tolerance in ROUNDED.items())
