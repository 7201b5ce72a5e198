"""The estimate of every lever over every axis is near what is counted."""

import json
from collections.abc import Callable

import memory_cells
import pytest
from memory_cells import RESULTS, cell
from memory_table import AXES, LEVERS, PAGE, reason

from hfscale.testing import RankPool

from ..sweeps import cases

FOUND = json.loads(RESULTS.read_text())
DAILY = [('recompute=["mlp"]', "tp"), ("gradient_compression", "dp_replicate")]


def test_what_was_measured_is_near() -> None:
    cells = {(name, axis): ratios for name, found in FOUND["256"].items() for axis, ratios in found.items()}
    assert len(cells) >= 18
    for (name, axis), (total, kept) in cells.items():
        assert not reason(LEVERS[name], AXES[axis])
        assert max(abs(total - 1), abs(kept - 1)) <= 0.03, (name, axis)


def test_they_are_written() -> None:
    assert memory_cells.table(FOUND) in PAGE.read_text()


@pytest.mark.parametrize(
    ("lever", "axis"),
    cases(
        dict.fromkeys([*((lever, axis) for lever in FOUND["256"] for axis in FOUND["256"][lever]), *DAILY]),
        daily=DAILY,
    ),
)
def test_a_cell(pools: Callable[[int], RankPool], lever: str, axis: str) -> None:
    for counted, estimated in pools(2).run(cell, LEVERS[lever], AXES[axis], 128):
        total = sum(estimated.values()) / (counted["held"] + counted["activations"])
        assert total == pytest.approx(1, abs=0.03)
