"""Schedules as CSV files, which torch reads as well."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from hfscale.errors import ConfigError
from hfscale.parallel.pipeline.csv_table import read_csv, write_csv
from hfscale.parallel.pipeline.orders import order


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("1f1b", 1), ("interleaved_zero_bubble", 2), ("dualpipev", 2), ("pipedream_2bw", 1)],
)
def test_round_trip(schedule: str, virtual: int, tmp_path: Path) -> None:
    actions = order(schedule, 3, 6, virtual)
    write_csv(actions, tmp_path / "a.csv")
    assert read_csv(tmp_path / "a.csv") == actions


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("zbv", 2), ("dualpipev", 2)]
)
def test_torch_reads_what_we_write_and_back(schedule: str, virtual: int, tmp_path: Path) -> None:
    count = 2 * virtual
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=2 * v,
            num_stages=count,
            group_size=2,
            group_rank=0,
            submod=torch.nn.Identity(),
        )
        for v in range(virtual)
    ]
    for stage in stages:
        stage.is_first = stage.stage_index == 0
        stage.is_last = False
    actions = order(schedule, 2, 4, virtual)
    write_csv(actions, tmp_path / "ours.csv")
    runtime = torch_schedules._PipelineScheduleRuntime(stages, 4)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    runtime._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    assert read_csv(tmp_path / "theirs.csv") == actions


def test_a_csv_is_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert order(str(path), 2, 2) == order("1f1b", 2, 2)
    with pytest.raises(
        ConfigError,
        match=r"2 ranks, 2 stages and 2 microbatches: use pp_size=2, virtual_stages=1, num",
    ):
        order(str(path), 4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("0F0,0X0\n", r"row 1: '0X0' is not an action: write stage, F, B, I or W, and microbatch"),
        ("0F0,0RECV_B0,0B0\n", "sends and receives are added by hfscale"),
        ("0F0,0F0,0B0\n", r"stage 0 has F, B, I, W of microbatch 0 \(2, 1, 0, 0\) times"),
        ("0F0,0I0\n", r"needs one F and either one B, or one I and one W"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is on rank 0 and on rank 1"),
        ("0F0,0B0,2F0,2B0\n", r"stages \[0, 2\]"),
        ("0F0,0B0,0B1\n", r"\(0, 'backward', 1\) .* has no forward"),
        ("0F0,0B0\n1F0,1B0,2F0,2B0\n", "3 stages do not divide evenly over 2 ranks"),
        ("0B0,0F0\n", "would deadlock"),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_csv(tmp_path / "bad.csv")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no schedule could be read"):
        order(str(tmp_path / "none.csv"), 2, 2)
