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
    assert len(cells) >= 80
    for (name, axis), (total, kept) in cells.items():
        assert not reason(LEVERS[name], AXES[axis])
        # A V's stages reach their most at different times, which only whole layers' activations are counted by.
        allowed = (0.1, 0.23) if axis == "pp, zbv" else (0.03, 0.11)
        assert abs(total - 1) <= allowed[0], (name, axis)
        assert abs(kept - 1) <= allowed[1], (name, axis)


def test_they_are_written() -> None:
    assert memory_cells.table(FOUND) in PAGE.read_text()


@pytest.mark.parametrize(
    ("lever", "axis"),
    cases(
        dict.fromkeys(
            [*((lever, axis) for lever in FOUND["256"] for axis in FOUND["256"][lever] if axis != "pp, zbv"), *DAILY]
        ),
        daily=DAILY,
    ),
)
def test_a_cell(pools: Callable[[int], RankPool], lever: str, axis: str) -> None:
    for counted, estimated in pools(2).run(cell, LEVERS[lever], AXES[axis], 128):
        total = sum(estimated.values()) / (counted["held"] + counted["activations"])
        assert total == pytest.approx(1, abs=0.03)
