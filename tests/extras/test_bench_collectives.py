"""Collectives are measured by message size, and a bucket is suggested."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hfscale.cli import main
from hfscale.cli.ranks import MeasurementError, run_ranks
from hfscale.extras.bench.collectives import COLLECTIVES, Measured, measure, suggested_bucket
from hfscale.testing import RankPool

Pools = Callable[[int], RankPool]
CPU = torch.device("cpu")


def test_every_rank_returns_the_same(pools: Pools) -> None:
    one, two = pools(2).run(measure, CPU, [1024, 5001], 0.0)
    assert one == two
    assert [(each.collective, each.size) for each in one] == [
        (name, s) for s in (1024, 5008) for name in COLLECTIVES
    ]
    assert all(each.ranks == 2 and each.seconds > 0 for each in one)


def test_bus_bandwidth_is_that_of_a_link() -> None:
    """All-reduce over 4 ranks sends and receives 3/4 of the message twice."""
    of = {name: Measured(name, 4000, 4, 2.0).bus_bandwidth for name in COLLECTIVES}
    assert of.pop("all-reduce") == 3000
    assert of.pop("broadcast") == of.pop("reduce") == 2000
    assert set(of.values()) == {1500}


def test_the_smallest_message_that_is_fast_enough() -> None:
    times = {10: 10.0, 100: 10.0, 1000: 25.0, 10000: 230.0}
    found = [Measured("all-reduce", size, 2, seconds) for size, seconds in times.items()]
    assert suggested_bucket([*found, Measured("broadcast", 1, 2, 1e-9)]) == 1000
    assert suggested_bucket([]) is None


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = []

    def run_ranks(world: int, function: object, sizes: list[int]) -> list[Measured]:
        asked.append((world, function, sizes))
        return [Measured(name, size, world, 1e-3) for size in sizes for name in COLLECTIVES]

    monkeypatch.setattr("hfscale.cli.ranks.run_ranks", run_ranks)
    monkeypatch.setenv("WORLD_SIZE", "1")
    line = ["bench", "collectives", "--processes", "3", "--sizes", "2KiB,4MiB"]
    assert main([*line, "--out", str(tmp_path / "c.svg")]) == 0
    out = capsys.readouterr().out
    assert "broadcast         0.002    4.194" in out
    assert "DDP(bucket_cap_mb=4)" in out
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    assert asked == [(3, measure, [2048, 2**22])]
    assert main([*line, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bucket_bytes"] == 2**22
    assert len(document["measured"]) == 2 * len(COLLECTIVES)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sizes", "4 kilobytes"], "is no size: write a positive number and KiB, MiB or GiB"),
        (["--processes", "1"], "--processes must be at least 2, got 1"),
        (["--out", "a.pdf"], "use .png or .svg"),
        (["--out", "absent/a.png"], "is not a folder"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert main(["bench", "collectives", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_of_its_own() -> None:
    found = run_ranks(2, measure, [1024], 0.0)
    assert [each.collective for each in found] == list(COLLECTIVES)
    with pytest.raises(MeasurementError, match="rank 0 failed: ValueError: too many"):
        run_ranks(2, fail)


def fail(_: torch.device) -> None:
    raise ValueError("too many")
