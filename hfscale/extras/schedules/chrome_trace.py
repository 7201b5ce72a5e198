"""Write and read recorded runs as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each action is one complete event (``"ph": "X"``): ``pid`` is the number of the run or of its step, ``tid`` the rank,
``ts`` and ``dur`` are microseconds, and ``args`` has stage, microbatch and kind. In timelines whose unit is
not seconds, one unit is written as one millisecond.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...parallel.pipeline.recorder import Record
from ...parallel.pipeline.timeline import KINDS, LETTERS, RELEASE, Action, Span, Timeline


def write_trace(path: Path, *timelines: Timeline, labels: Sequence[str] = ()) -> None:
    """Write runs, or steps of a run, to ``path`` as processes (``pid``) 0, 1, ... of a Chrome trace. Their names are
    ``labels`` or, by default, the names of the schedules.
    """
    names = labels or [timeline.name or f"run {run}" for run, timeline in enumerate(timelines)]
    events = [
        event
        for run, timeline in enumerate(timelines)
        for event in _events(run, timeline, names[run])
    ]
    about = [
        {
            "schedule": t.name,
            "unit": t.unit,
            "microbatches": t.num_microbatches,
            "ranks": t.num_ranks,
        }
        for t in timelines
    ]
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"runs": about}}
    Path(path).write_text(json.dumps(document) + "\n")


def read_runs(path: Path) -> dict[int, Timeline]:
    """Read every run in the file by its number (``pid``); each run starts at time 0."""
    try:
        document = json.loads(Path(path).read_text())
        recorded = document["traceEvents"] if isinstance(document, dict) else document
        about = document.get("otherData", {}).get("runs", []) if isinstance(document, dict) else []
        events: dict[int, list[tuple[int, Span]]] = {}
        for event in recorded:
            arguments = event.get("args", {})
            if event.get("ph") != "X" or arguments.get("kind") not in KINDS:
                continue  # metadata, or an event of a profiler
            run = int(event.get("pid", 0))
            factor = 1e-6 if _about(about, run).get("unit", "s") == "s" else 1e-3
            action = Action(
                int(arguments["stage"]),
                arguments["kind"],
                int(arguments["microbatch"]),
                bool(arguments.get("paired")),
            )
            begin = float(event["ts"])
            end = begin + float(event["dur"])
            events.setdefault(run, []).append(
                (int(event["tid"]), Span(action, begin * factor, end * factor))
            )
        runs: dict[int, Timeline] = {}
        for run in sorted(events):
            told = _about(about, run)
            count = max(
                int(told.get("ranks", 0)),
                1 + max(rank for rank, _ in events[run]),
            )
            rows = [[span for of, span in events[run] if of == rank] for rank in range(count)]
            how = (
                told.get("schedule", ""),
                told.get("unit", "s"),
                told.get("microbatches", 0),
            )
            runs[run] = _from_zero(rows, *how)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a trace of a pipeline: {type(error).__name__}: {error}: give a trace of "
            "hfscale.record_schedule"
        ) from error
    if not runs:
        raise ConfigError(
            f"{path} has no forward or backward actions: give a trace of hfscale.record_schedule or `hfscale schedule "
            "--save-trace`"
        )
    return runs


def last_whole_step(runs: dict[int, Timeline]) -> Timeline:
    """Return the last run that trained on every rank (no evaluation, no interrupted step); otherwise the last run."""
    whole = [timeline for timeline in runs.values() if all(map(_trained, timeline.ranks))]
    return whole[-1] if whole else list(runs.values())[-1]


def _trained(spans: Sequence[Span]) -> bool:
    """Return whether every forward pass of a rank is followed by its backward pass."""
    kinds = [span.action.kind for span in spans]
    return 0 < kinds.count("forward") == sum(kind in RELEASE for kind in kinds)


def _about(runs: list[dict[str, Any]], run: int) -> dict[str, Any]:
    return runs[run] if 0 <= run < len(runs) else {}


def merge_records(records: Sequence[Record], name: str = "", microbatches: int = 0) -> Timeline:
    """Merge the recorded actions of all ranks, given in the order of ranks, into one timeline in seconds that starts at
    0.
    """
    # perf_counter is the machine's monotonic clock: comparable between processes of a machine, but not between
    # machines.
    clock = {record.host: record.origin for record in reversed(records)}
    rows = [
        [
            Span(
                action,
                (begin - clock[record.host]) * 1e-9,
                (end - clock[record.host]) * 1e-9,
            )
            for action, begin, end in record.events
        ]
        for record in records
    ]
    return _from_zero(rows, name, "s", microbatches)


def _from_zero(
    rows: Sequence[list[Span]],
    name: str,
    unit: str,
    microbatches: int,
) -> Timeline:
    first = min((span.start for row in rows for span in row), default=0.0)
    ranks = (
        sorted(
            (Span(span.action, span.start - first, span.end - first) for span in row),
            key=lambda span: span.start,
        )
        for row in rows
    )
    return Timeline(tuple(map(tuple, ranks)), name=name, unit=unit, microbatches=microbatches)


def _events(
    run: int,
    timeline: Timeline,
    name: str,
) -> Iterator[dict[str, Any]]:
    factor = 1e6 if timeline.unit == "s" else 1e3
    yield {"ph": "M", "name": "process_name", "pid": run, "args": {"name": name}}
    for rank in range(timeline.num_ranks):
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": run,
            "tid": rank,
            "args": {"name": f"rank {rank}"},
        }
    for rank, span in timeline.spans():
        stage, kind, microbatch, paired = span.action
        yield {
            "ph": "X",
            "name": f"{stage}{LETTERS[kind]}{microbatch}",
            "cat": kind,
            "pid": run,
            "tid": rank,
            "ts": round(span.start * factor, 3),
            "dur": round((span.end - span.start) * factor, 3),
            "args": {"stage": stage, "microbatch": microbatch, "kind": kind}
            | ({"paired": True} if paired else {}),
        }
