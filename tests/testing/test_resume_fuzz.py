"""Random runs that are killed and go on in another layout (``scripts/resume_fuzz.py``)."""

from pathlib import Path

import pytest

from hfscale.testing import RankPool
from hfscale.testing.fuzz.resume import KINDS, choose_resume, judge_resume


def test_draws_follow_from_seed_and_index() -> None:
    draws = [choose_resume(5, index) for index in range(30)]
    assert draws == [choose_resume(5, index) for index in range(30)]
    assert {draw.kind for draw in draws} == set(KINDS)
    axes = {name for draw in draws for name in (*draw.first, *draw.second)}
    assert axes >= {"tp_size", "pp_size", "dp_shard_size", "dp_replicate_size", "cp_size", "ep_size"}
    assert all(draw.first != draw.second for draw in draws)


@pytest.mark.slow
def test_killed_runs_go_on_in_other_layouts(tmp_path: Path) -> None:
    pools: dict[int, RankPool] = {}
    try:
        for index in range(10):
            draw = choose_resume(17, index)
            (tmp_path / str(index)).mkdir()
            assert not (problem := judge_resume(draw, tmp_path / str(index), pools)), f"{draw.write()}: {problem}"
    finally:
        for pool in pools.values():
            pool.close()
