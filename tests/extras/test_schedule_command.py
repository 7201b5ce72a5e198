"""``hfscale schedule``: the drawing in the terminal, the pictures and the files."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from hfscale import ParallelConfig
from hfscale.cli import main
from hfscale.extras.schedules.chrome_trace import read_runs, write_trace
from hfscale.extras.schedules.draw import render
from hfscale.extras.schedules.schedule_plot import draw, title
from hfscale.parallel.pipeline.csv_table import read_csv
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.simulation import Costs, simulate
from hfscale.parallel.pipeline.timeline import Action, Timeline

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["schedule", *argv]) == 0
    return capsys.readouterr().out


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["schedule", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out = _run(capsys, "--pp", "4", "--microbatches", "4", "--schedule", "1f1b", "--width", "80")
    assert out == (
        "1f1b, p = 4, m = 4, bubble 75.0 % of the work\n"
        "rank 0 F0-F1-F2-F3-..................B0----...B1----...B2----...B3----\n"
        "rank 1 ...F0-F1-F2-............B0----F3-B1----...B2----...B3----......\n"
        "rank 2 ......F0-F1-......B0----F2-B1----F3-B2----...B3----............\n"
        "rank 3 .........F0-B0----F1-B1----F2-B2----F3-B3----..................\n"
        "\n"
        "F forward   B backward   . idle\n"
    )


def test_torchs_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--pp", "2", "--schedule", "Interleaved1F1B"]) == 0
    assert capsys.readouterr().out.startswith("interleaved1f1b, p = 2")
    assert ParallelConfig(pp_size=2, pipeline_schedule="GPipe").pipeline_schedule == "gpipe"


def test_named_in_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    named = _run(capsys, "zbv", "--pp", "2")
    assert (
        named
        == _run(capsys, "--pp", "2", "--schedule", "zbv")
        == _run(capsys, "zbv", "--pp", "2", "--schedule", "zbv")
    )
    assert named.startswith("zbv, p = 2")
    assert "two schedules are named, zbv and --schedule 1f1b" in _refused(
        capsys, "zbv", "--schedule", "1f1b"
    )


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--pp", "2", "--microbatches", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["planned"]
    assert found["bubble"] == pytest.approx(1 / 4)
    assert found["ranks"][1][0] == {
        **{"stage": 1, "kind": "forward", "microbatch": 0, "paired": False},
        **{"start": 1.0, "end": 2.0},
    }


def test_transfers_take_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--pp", "2", "--microbatches", "1", "--schedule", "1f1b", "--width", "80")
    without = _run(capsys, *argv)
    with_transfers = _run(capsys, *argv, "--transfer", "0.5")
    assert "bubble 100.0 % of the work" in without
    assert "bubble 133.3 % of the work" in with_transfers  # two transfers, each half a forward pass
    assert "must be a time of at least 0 (1 is the time of one forward pass), got -1" in _refused(
        capsys, *argv, "--transfer", "-1"
    )


@pytest.mark.parametrize("width", [30, 47, 60, 200])
@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_never_wider_than_asked(width: int, schedule: str) -> None:
    timeline = simulate(order(schedule, 4, 16, 2), name=schedule)
    for colour in (False, True):
        lines = ANSI.sub("", render([("", timeline)], width, colour)).splitlines()[1:5]
        assert {len(line) for line in lines} <= set(range(width + 1))
        assert len({len(line) for line in lines}) == 1


def test_colours(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--pp", "2", "--microbatches", "4", "--schedule", "zbv", "--width", "120")
    assert "\x1b[" in _run(capsys, *argv, "--color", "always")
    assert "\x1b[" not in _run(capsys, *argv)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("interleaved1f1b", "interleaved1f1b, p = 4, m = 8, v = 2, bubble 18.8 % of the work"),
        ("zbv", "zbv, p = 4, m = 8, v = 2, bubble 6.2 % of the work, 0.0 % as a rank sees it"),
        (
            "pipedream_2bw",
            "pipedream_2bw, p = 4, m = 8, bubble 12.5 % of the work, idle 0.0 % once filled",
        ),
    ],
)
def test_titles(schedule: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        _run(capsys, "--pp", "4", "--microbatches", "8", "--schedule", schedule).splitlines()[0]
        == text
    )


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--csv": "a.csv", "--out": "a.png", "--save-trace": "a.json"}
    files = [part for flag, name in names.items() for part in (flag, str(tmp_path / name))]
    out = _run(capsys, "--pp", "2", "--microbatches", "4", "--schedule", "dualpipev", *files)
    assert read_csv(tmp_path / "a.csv") == order("dualpipev", 2, 4, 2)
    assert read_runs(tmp_path / "a.json")[0].ranks == simulate(order("dualpipev", 2, 4, 2)).ranks
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 900
    assert height > 200
    assert out.count("wrote ") == 3


def test_an_svg_has_every_number_and_is_the_same_every_time(tmp_path: Path) -> None:
    timeline = simulate(order("1f1b", 2, 12), name="1f1b")
    draw(tmp_path / "a.svg", [("", timeline)])
    text = (tmp_path / "a.svg").read_text()
    assert title(timeline) in text
    assert len(re.findall(r">11</text>", text)) == 4  # forward and backward on two ranks
    draw(tmp_path / "b.svg", [("", timeline)])
    assert (tmp_path / "b.svg").read_text() == text


def test_planned_above_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = replace(
        simulate(order("1f1b", 2, 4), Costs(0.01, 0.03, communication=0.002), "1f1b"), unit="s"
    )
    write_trace(tmp_path / "t.json", ran)
    out = _run(capsys, "--trace", str(tmp_path / "t.json"), "--out", str(tmp_path / "t.svg"))
    lines = out.splitlines()
    assert lines[0] == "planned: 1f1b, p = 2, m = 4, bubble 25.0 % of the work"
    assert lines[4].startswith("measured: 1f1b, p = 2, m = 4, bubble ")
    assert "seconds" in (tmp_path / "t.svg").read_text()
    message = _refused(capsys, "--trace", str(tmp_path / "t.json"), "--pp", "4")
    assert "on 2 pipeline ranks, but the plan has 4: use --pp 2" in message


def test_one_of_several_recorded_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ran(microbatches: int, kinds: tuple[str, ...]) -> Timeline:
        planned = tuple(
            tuple(a for a in row if a.kind in kinds) for row in order("1f1b", 2, microbatches)
        )
        return replace(simulate(planned, Costs(0.01, 0.03), "1f1b"), unit="s")

    both = ("forward", "backward")
    trace = tmp_path / "t.json"
    write_trace(trace, ran(3, both), ran(5, both), ran(6, ("forward",)))
    for argv, microbatches in (
        ([], 5),
        (["--step", "1"], 3),
        (["--step", "2"], 5),
        (["--step", "3"], 6),
    ):
        lines = _run(capsys, "--trace", str(trace), *argv).splitlines()
        assert lines[0].startswith(f"planned: 1f1b, p = 2, m = {microbatches}, ")
        assert lines[4].startswith(f"measured: 1f1b, p = 2, m = {microbatches}, ")
        assert ("B backward" in lines[8]) == (microbatches != 6)  # an evaluation is planned as one
    assert "use one of 1, 2, 3" in _refused(capsys, "--trace", str(trace), "--step", "4")
    assert "give its --trace as well" in _refused(
        capsys, "--pp", "2", "--microbatches", "4", "--step", "1"
    )


def test_a_recorded_update_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_updates = tuple(
        (*row, Action(rank, "update", 7)) for rank, row in enumerate(order("gpipe", 2, 2))
    )
    write_trace(
        tmp_path / "t.json", replace(simulate(with_updates, Costs(update=2.0), "gpipe"), unit="s")
    )
    rows = _run(capsys, "--trace", str(tmp_path / "t.json"), "--width", "80").splitlines()
    assert rows[1:3] == rows[5:7]
    assert all("U7" in row for row in rows[1:3])


def test_a_trace_of_a_schedule_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    write_trace(tmp_path / "t.json", simulate(read_csv(path), name=str(path)))
    assert _run(capsys, "--trace", str(tmp_path / "t.json")).startswith(
        f"planned: {path}, p = 2, m = 2"
    )


def test_a_schedule_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert "p = 2, m = 2" in _run(capsys, "--schedule", str(path))
    assert "2 microbatches: use pp_size=2" in _refused(capsys, "--schedule", str(path), "--pp", "3")


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--pp", "2", "--microbatches", "4")
    assert "--pp is missing" in _refused(capsys, "--schedule", "gpipe")
    assert "use one of gpipe" in _refused(capsys, *sizes, "--schedule", "pipe")
    assert "use .png or .svg" in _refused(capsys, *sizes, "--out", str(tmp_path / "a.pdf"))
    assert "is not a folder" in _refused(capsys, *sizes, "--out", str(tmp_path / "none" / "a.png"))
    assert "is not a folder" in _refused(capsys, *sizes, "--csv", str(tmp_path / "none" / "a.csv"))
    assert "is not a folder" in _refused(
        capsys, *sizes, "--save-trace", str(tmp_path / "none" / "a.json")
    )
    assert "is not a trace" in _refused(capsys, "--trace", str(tmp_path / "none.json"))
    (tmp_path / "empty.json").write_text(json.dumps({"traceEvents": []}))
    assert "has no forward or backward actions" in _refused(
        capsys, "--trace", str(tmp_path / "empty.json")
    )
