"""Traces: written for Perfetto, read back, and recorded by running ranks."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hfscale.errors import ConfigError
from hfscale.extras.schedules.chrome_trace import merge_records, read_runs, write_trace
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.recorder import Record, Recorder
from hfscale.parallel.pipeline.simulation import simulate
from hfscale.parallel.pipeline.timeline import Action, Span


def test_round_trip(tmp_path: Path) -> None:
    first = simulate(order("dualpipev", 2, 4, 2), name="dualpipev")
    second = simulate(order("1f1b", 4, 8), name="1f1b")
    write_trace(tmp_path / "t.json", first, second)
    found = read_runs(tmp_path / "t.json")[0]
    assert found.ranks == first.ranks
    assert (found.name, found.unit, found.microbatches) == ("dualpipev", "forwards", 4)
    assert read_runs(tmp_path / "t.json")[1].ranks == second.ranks


def test_what_perfetto_reads(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", simulate(order("1f1b", 2, 2), name="1f1b"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == 8
    assert complete[0] == {
        "ph": "X",
        "name": "0F0",
        "cat": "forward",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 1000.0,
        "args": {"stage": 0, "microbatch": 0, "kind": "forward"},
    }
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["1f1b", "rank 0", "rank 1"]


def test_other_events_are_passed_over(tmp_path: Path) -> None:
    ours = {
        "ph": "X",
        "pid": 0,
        "tid": 1,
        "ts": 5,
        "dur": 2,
        "args": {"stage": 0, "microbatch": 0, "kind": "forward"},
    }
    profiler = {"ph": "X", "pid": 0, "tid": 1, "ts": 0, "dur": 9, "name": "aten::mm"}
    (tmp_path / "t.json").write_text(json.dumps([profiler, ours, {"ph": "i", "ts": 0}]))
    timeline = read_runs(tmp_path / "t.json")[0]
    assert timeline.unit == "s"
    assert timeline.ranks[0] == ()
    assert timeline.ranks[1][0].end == pytest.approx(2e-6)


def test_runs_have_names_and_keep_their_times(tmp_path: Path) -> None:
    first = simulate(order("1f1b", 2, 2), name="1f1b")
    later = tuple(
        tuple(Span(s.action, s.start + 100, s.end + 100) for s in spans) for spans in first.ranks
    )
    write_trace(tmp_path / "t.json", first, replace(first, ranks=later), labels=["one", "two"])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event.get("name") == "process_name"] == [
        "one",
        "two",
    ]
    assert (
        min(event["ts"] for event in events if event.get("pid") == 1 and "ts" in event) == 100_000
    )
    assert read_runs(tmp_path / "t.json")[1].ranks == first.ranks  # read, each begins at 0
    assert list(read_runs(tmp_path / "t.json")) == [0, 1]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"traceEvents": []}', '[{"ph": "X", "args": 3}]', "[1]"]
)
def test_bad_traces(text: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=r"t\.json"):
        read_runs(tmp_path / "t.json")[0]


def test_recorders_of_two_ranks() -> None:
    recorders = [Recorder(), Recorder()]
    for recorder in recorders:
        recorder.start()
    for rank, recorder in enumerate(recorders):
        with recorder.run(Action(rank, "forward", 0)):
            time.sleep(0.01)
    timeline = merge_records([recorder.record for recorder in recorders], "gpipe", 1)
    assert timeline.unit == "s"
    assert timeline.start == 0
    assert 0.02 <= timeline.makespan < 1
    assert timeline.ranks[1][0].start >= timeline.ranks[0][0].end


def test_clocks_of_two_machines_are_set_at_the_start() -> None:
    action = Action(0, "forward", 0)
    here = Record("a", 1000, [(action, 1500, 2000)])
    there = Record("b", 777_000, [(action, 777_600, 778_000)])
    same = Record("a", 1100, [(action, 1700, 1800)])
    timeline = merge_records([here, there, same])
    assert [round(spans[0].start * 1e9) for spans in timeline.ranks] == [0, 100, 200]


def test_the_clock_is_read_when_what_was_begun_is_done() -> None:
    waits: list[int] = []
    recorder = Recorder(lambda: (waits.append(time.perf_counter_ns()), time.sleep(0.002))[1])
    with recorder.run(Action(0, "forward", 0)):
        pass
    ((_, begin, end),) = recorder.record.events
    assert len(waits) == 2
    assert begin >= waits[0] + 2_000_000
    assert end >= waits[1] + 2_000_000


def test_nothing_is_noted_where_a_computation_fails() -> None:
    recorder = Recorder()
    with pytest.raises(RuntimeError), recorder.run(Action(0, "forward", 0)):
        raise RuntimeError
    assert recorder.record.events == []
