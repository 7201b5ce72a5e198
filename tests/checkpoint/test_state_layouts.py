"""A run that stops in one layout goes on in another as if it had not stopped (traps T24, T25, T29)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hfscale import ParallelConfig
from hfscale.checkpoint.state_format import StateReader
from hfscale.testing import RankPool

from ..features.quantization.models import save, wide
from ..sweeps import cases
from .state_runs import LAYOUTS, leg, loaders

Pools = Callable[[int], RankPool]
WIDE = torch.float64
NARROW = torch.float32
TOLERANCE = {WIDE: (1e-12, 1e-12), NARROW: (5e-6, 2e-4)}
"""Of losses, and of norms of gradients. In float32 a rounding moves a state to the next of 8-bit values: runs that
nothing interrupted differ by 3e-6 and 1e-4 after six steps of AdamW, tp2 and one process.
"""

# What is trained, the optimizer, the type, and the layouts one after the other.
CHAINS = [
    ("tied", "stock", WIDE, ["tp2", "pp2", "one", "tp2-shard2", "tp4", "zbv"]),
    ("tied", "adamw_torch", WIDE, ["pp2-uneven", "shard2", "pp2", "cp2"]),
    ("ragged", "stock", WIDE, ["tp2-shard2", "tp4", "pp2-tp2", "one", "shard4"]),
    ("narrow", "adamw_torch", WIDE, ["shard4", "pp2-tp2", "tp2-shard2"]),
    ("ragged", "adafactor", WIDE, ["tp2", "pp2-shard2", "tp4", "one", "sp2"]),
    ("narrow", "adafactor", WIDE, ["tp2", "shard2"]),
    ("ragged", "muon", WIDE, ["tp2-shard2", "one", "pp2-tp2"]),
    ("rows", "adamw_8bit", NARROW, ["tp2", "shard2", "one", "tp4", "pp2-tp2"]),
    ("rows", "ademamix_8bit", NARROW, ["shard2", "tp2", "one"]),
    ("mixture", "stock", WIDE, ["ep2", "one", "ep2-tp2", "pp2", "ep2-cut", "ep4", "tp2"]),
    ("mixture", "few", WIDE, ["ep2", "pp2", "ep2-tp2", "one"]),
    ("lora", "stock", WIDE, ["tp2", "pp2", "shard2", "tp4", "one"]),
    ("oft", "adamw_torch", WIDE, ["tp2", "shard2"]),
    ("four-bit", "sums", NARROW, ["tp2", "one", "pp2", "shard2"]),  # adapters over a base in 4 bits
]
RARE = [
    ("mixture", "stock"),
    ("tied", "stock"),
    ("ragged", "adafactor"),
    ("ragged", "muon"),
    ("narrow", "adamw_torch"),
    ("tied", "adamw_torch"),
    ("ragged", "stock"),
    ("rows", "adamw_8bit"),
    ("lora", "stock"),
    ("four-bit", "sums"),
]


def run(pools: Pools, layout: str, *arguments: Any) -> Any:
    size = ParallelConfig(**LAYOUTS[layout]).total_size
    return pools(size).run(leg, *arguments) if size > 1 else [leg(*arguments)]


def assert_same_bits(one: Path, other: Path) -> None:
    """Two states hold the same tensors as one process would have them, whatever the layouts that wrote them."""
    a, b = (StateReader(path) for path in (one, other))
    assert a.index.tensors.keys() == b.index.tensors.keys()
    assert a.index.numbers == b.index.numbers
    assert len(a.index.tensors) > 20
    for key in a.index.tensors:
        assert torch.equal(a.whole(key), b.whole(key)), key


@pytest.mark.parametrize(
    ("kind", "name", "dtype", "layouts"),
    cases(CHAINS, daily=[chain for chain in CHAINS if chain[:2] not in RARE]),
    ids=["-".join(chain[:2]) for chain in CHAINS],
)
def test_goes_on_in_another_layout(
    pools: Pools, tmp_path: Path, kind: str, name: str, dtype: torch.dtype, layouts: list[str]
) -> None:
    name = "stock" if name == "few" else name
    last = len(layouts) + 1
    base = save(wide("llama"), tmp_path / "base") if kind == "four-bit" else None
    expected, weights = leg(kind, name, "one", dtype, range(last), str(tmp_path / "whole"), base)
    directory = str(tmp_path / "legs")
    start = 0
    for layout in layouts:
        stop = start + 2 if start == 0 else start + 1
        found = run(pools, layout, kind, name, layout, dtype, range(start, stop), directory, base)
        for losses, _ in found:
            for mine, theirs in zip(losses, expected[start:stop], strict=True):
                for value, other, tolerance in zip(mine, theirs, TOLERANCE[dtype], strict=True):
                    assert value == pytest.approx(other, rel=tolerance, abs=0), (layout, start)
        if start:
            assert_same_bits(Path(directory) / f"step-{start}", Path(f"{directory}-moved"))
        start = stop
    assert start == last
    ended = found[0][1]
    assert ended.keys() == weights.keys()
    if dtype == WIDE:
        for key, weight in weights.items():
            assert (ended[key] - weight).abs().max() <= 1e-11 * weight.abs().max(), key


def test_loaders_with_a_state(pools: Pools, tmp_path: Path) -> None:
    """Each distinct batch goes on where it was, on the ranks that are given it now."""
    directory = str(tmp_path / "state")
    # Batch rank 1 is further by 100.
    assert pools(4).run(loaders, "tp2-shard2", directory, None) == [
        0,
        0,
        100,
        100,
    ]
    assert pools(4).run(loaders, "pp2-shard2", directory, directory) == [0, 100, 0, 100]
    assert pools(2).run(loaders, "shard2", directory, directory) == [0, 100]
    for message in pools(2).run(loaders, "tp2", directory, directory):
        assert "has 2 states of 'dataloader', one for each group of ranks" in message
        assert "skip_first_batches" in message
