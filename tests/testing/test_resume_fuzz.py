"""Random runs that are killed and go on in another layout (``scripts/resume_fuzz.py``)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hfscale.testing import RankPool
from tests.fuzz.lever_values import LEVERS
from tests.fuzz.resume import KINDS, choose_resume, judge_resume
from tests.fuzz.resume_compared import differences, further_off, not_bit_by_bit
from tests.fuzz.resume_levers import are_exact


@pytest.mark.slow
def test_draws_follow_from_seed_and_index() -> None:
    draws = [choose_resume(5, index) for index in range(30)]
    assert draws == [choose_resume(5, index) for index in range(30)]
    assert {draw.kind for draw in draws} == set(KINDS)
    axes = {name for draw in draws for name in (*draw.first, *draw.second)}
    assert axes >= {
        "tp_size",
        "pp_size",
        "dp_shard_size",
        "dp_replicate_size",
        "cp_size",
        "ep_size",
    }
    assert all(draw.first != draw.second for draw in draws if not draw.levers)


@pytest.mark.slow
def test_levers_are_drawn_in_layouts_that_they_fit() -> None:
    draws = [choose_resume(5, index) for index in range(80)]
    assert {name for draw in draws for name in draw.levers} == set(LEVERS)
    for draw in draws:
        assert ("gradient_compression" in draw.levers) == ("gradient_compression" in draw.first)
        assert draw.first == draw.second or draw.kind != "mixture" or are_exact(draw.levers)
    for same in (True, False):
        assert {
            name for draw in draws for name in draw.levers if (draw.first == draw.second) == same
        } == set(LEVERS)


def told(loss: float, weight: float, start: int = 0, scale: float = 8.0) -> dict[str, Any]:
    steps = 4 - start
    weights = {"w": torch.full((3,), weight, dtype=torch.float64)}
    return {
        "start": start,
        "losses": [1.0, 1.0, 1.0, loss][start:],
        "norms": [1.0] * steps,
        "scales": [(scale, 0.0)] * steps,
        "weights": weights,
    }


def test_what_is_lost_is_seen() -> None:
    whole, other = told(1.0, 1.0), told(1.0, 1.0, start=2, scale=4.0)
    for compared in (
        lambda found: differences(False, whole, [found]),
        lambda found: not_bit_by_bit([whole], [found]),
        lambda found: further_off(told(1.01, 1.01), [whole], [found]),
    ):
        assert not compared(told(1.0, 1.0, start=2))
        assert "scales" in compared(other)
        assert "losses" in compared(told(1.1, 1.0, start=2))
        assert compared(told(1.0, 1.1, start=2))
    assert "w on rank 0 is not" in not_bit_by_bit([whole], [told(1.0, 1.0 + 1e-15, start=2)])
    assert not further_off(told(1.01, 1.01), [whole], [told(1.03, 1.03, start=2)])


@pytest.mark.slow
def test_killed_runs_go_on_in_other_layouts(tmp_path: Path) -> None:
    pools: dict[int, RankPool] = {}
    try:
        for index in range(10):
            draw = choose_resume(17, index)
            (tmp_path / str(index)).mkdir()
            assert not (problem := judge_resume(draw, tmp_path / str(index), pools)), (
                f"{draw.write()}: {problem}"
            )
    finally:
        for pool in pools.values():
            pool.close()
