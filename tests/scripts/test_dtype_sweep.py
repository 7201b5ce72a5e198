"""In bfloat16, as users load it: types and losses are stock's; scripts/dtype_sweep.py does it for all families."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]


# A dense one under every layout; under the data axes, two types in separate modules and in one.
@pytest.mark.daily("qwen3-True")
@pytest.mark.parametrize(
    ("family", "all_columns"), [("qwen3", True), ("ernie4_5_moe", False), ("olmo_hybrid", False)]
)
def test_a_family_in_bfloat16(pools: Pools, family: str, all_columns: bool) -> None:
    from dtype_sweep import COLUMNS, judge

    columns = {
        name: column
        for name, column in COLUMNS.items()
        if all_columns or name.endswith("dp_shard2")
    }
    judged = judge(family, pools(2), columns)
    assert judged is not None
    assert set(judged[0]) == {"equal"}, judged


def test_rows_of_other_families_stay(tmp_path: Path) -> None:
    from dtype_sweep import read, summarize, write

    rows = {
        "opt": "| opt | equal | equal | refused | equal | equal | no |",
        "a": "| a | FAILS | equal | equal | equal | equal |  |",
    }
    write(tmp_path / "types.md", rows)
    assert read(tmp_path / "types.md") == rows
    assert summarize(rows).startswith("2 families; tp2: 1 equal, 1 FAILS; dp_shard2: 2 equal")
