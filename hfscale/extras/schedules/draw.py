"""Draw a planned pipeline schedule, alone or next to a recorded run (``hfscale schedule``)."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...cli.look import print_json
from ...config.schedules import schedule_names, schedule_of, spelled
from ...errors import ConfigError
from ...parallel.pipeline.csv_table import read_csv, write_csv
from ...parallel.pipeline.orders import order
from ...parallel.pipeline.simulation import DEFAULT_COSTS, Costs, simulate
from ...parallel.pipeline.timeline import KINDS, Kind, Order, Span, Timeline
from .chrome_trace import last_whole_step, read_runs, write_trace
from .schedule_plot import LOOKS, draw, forward_length, has_later_stages, shown_kinds, title

_WIDEST_FORWARD = 4  # columns


def run_schedule(arguments: argparse.Namespace) -> None:
    """Run one ``hfscale schedule`` command."""
    measured = _measured(arguments.trace, arguments.step)
    actions, schedule, microbatches = _asked(arguments, measured)
    if measured:
        actions = _as_measured(actions, measured)
    costs = measured_costs(measured) if measured else DEFAULT_COSTS
    transfer = arguments.transfer or 0.0
    if transfer < 0:
        raise ConfigError(
            f"--transfer must be a time of at least 0 (1 is the time of one forward pass), got {transfer}: give a "
            "larger number"
        )
    costs = replace(costs, communication=transfer * costs.forward)
    planned = simulate(actions, costs, schedule, microbatches)
    shown = [("", planned)]
    if measured:
        planned = replace(planned, unit=measured.unit)
        ranks = measured.num_ranks
        if ranks != planned.num_ranks:
            raise ConfigError(
                f"{arguments.trace} was recorded on {ranks} pipeline ranks, but the plan has {planned.num_ranks}: use "
                f"--pp {ranks}"
            )
        name = measured.name or schedule
        count = measured.microbatches or microbatches
        shown = [
            ("planned", planned),
            ("measured", replace(measured, name=name, microbatches=count)),
        ]
    _write(arguments, actions, planned, shown)


def _write(
    arguments: argparse.Namespace,
    planned_order: Order,
    planned: Timeline,
    shown: list[tuple[str, Timeline]],
) -> None:
    """Write the requested files, and print the timelines to the terminal."""
    if arguments.out:  # first, because it may fail
        draw(arguments.out, shown)
    if arguments.csv:
        write_csv(planned_order, arguments.csv)
    if arguments.save_trace:
        write_trace(arguments.save_trace, planned)
    if arguments.json:
        print_json({name or "planned": described(timeline) for name, timeline in shown})
        return
    width = arguments.width or shutil.get_terminal_size((100, 24)).columns
    colour = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    print(render(shown, width, colour))
    for path in filter(None, (arguments.csv, arguments.save_trace, arguments.out)):
        print(f"wrote {path}")


def described(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as plain data; times are in its unit, idle time is a fraction of the work."""
    return {
        "schedule": timeline.name,
        "unit": timeline.unit,
        "microbatches": timeline.num_microbatches,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "peak_live": timeline.peak_live(),
        "ranks": [
            [
                {
                    **span.action._asdict(),
                    "start": span.start,
                    "end": span.end,
                }
                for span in spans
            ]
            for spans in timeline.ranks
        ],
    }


def _measured(trace: Path | None, step: int | None) -> Timeline | None:
    """Return the step of a recorded run that is to be drawn; ``None`` without a trace."""
    if trace is None:
        if step is not None:
            raise ConfigError(
                f"--step {step} chooses a step of a recorded run: give its --trace as well"
            )
        return None
    runs = read_runs(trace)
    if step is None:
        return last_whole_step(runs)
    if step - 1 not in runs:
        raise ConfigError(
            f"--step {step} is not in {trace}: use one of {', '.join(str(run + 1) for run in runs)}"
        )
    return runs[step - 1]


def _as_measured(planned: Order, measured: Timeline) -> Order:
    """Add a recorded run's updates to the planned order, and remove backward passes if the run has none."""
    kinds = {span.action.kind for _, span in measured.spans()}
    if kinds == {"forward"}:
        return tuple(
            tuple(a._replace(paired=False) for a in row if a.kind == "forward") for row in planned
        )
    if len(planned) != measured.num_ranks or any(
        action.kind == "update" for row in planned for action in row
    ):
        return planned
    updates = [
        [span.action for span in spans if span.action.kind == "update"] for spans in measured.ranks
    ]
    return tuple((*row, *after) for row, after in zip(planned, updates, strict=True))


def measured_costs(timeline: Timeline) -> Costs:
    """Return the mean duration of each kind of action in a run; for kinds that did not run, the usual ratio to a
    forward pass.
    """
    lengths: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _, span in timeline.spans():
        lengths[span.action.kind].append(span.end - span.start)
    if not lengths["forward"]:
        raise ConfigError(
            "a trace must have forward actions to be compared with a plan, but this one has none: record a step"
        )
    forward = sum(lengths["forward"]) / len(lengths["forward"])
    own = {kind: sum(lengths[kind]) / len(lengths[kind]) for kind in KINDS if lengths[kind]}
    costs: dict[str, Any] = {
        str(kind): own.get(kind, DEFAULT_COSTS.duration(kind) * forward) for kind in KINDS
    }
    return Costs(**costs)


def _asked(arguments: argparse.Namespace, measured: Timeline | None) -> tuple[Order, str, int]:
    """Return the requested order of actions, its schedule and its number of microbatches. Options that are left out are
    taken from the recorded run or CSV file.
    """
    known = measured is not None and (
        measured.name in schedule_names() or measured.name.endswith(".csv")
    )
    schedule = spelled(arguments.schedule or "") or (
        measured.name if measured and known else "1f1b"
    )
    runs = [measured] if measured else []
    if schedule.endswith(".csv"):
        runs.append(simulate(read_csv(Path(schedule))))

    def size(given: int | None, name: str, default: int = 0) -> int:
        return given or next((count for run in runs if (count := getattr(run, name))), default)

    ranks = size(arguments.pp, "num_ranks")
    if not ranks:
        raise ConfigError("--pp is missing: say how many pipeline ranks, as in --pp 4")
    # The default number of microbatches is that of plans and runs.
    microbatches = size(arguments.microbatches, "num_microbatches", 2 * ranks)
    virtual = size(arguments.virtual_stages, "virtual_stages", schedule_of(schedule).default_stages)
    steps = arguments.steps or _steps(schedule, microbatches, measured)
    return order(schedule, ranks, microbatches, virtual, steps), schedule, microbatches


def _steps(schedule: str, microbatches: int, measured: Timeline | None) -> int:
    """Return the number of steps to draw: one for schedules with flushes; for others, all recorded steps, or enough to
    show how steps overlap.
    """
    kind = schedule_of(schedule)
    if kind.flushes:
        return 1
    if measured:
        run = 1 + max(
            span.action.microbatch for _, span in measured.spans() if span.action.kind == "forward"
        )
        return max(1, run // microbatches)
    return (
        3 if kind.microbatches_per_rank else 1
    )  # with an update per microbatch, one step shows the overlap


def render(
    timelines: Sequence[tuple[str, Timeline]], width: int = 100, colour: bool = False
) -> str:
    """Render ``(heading, timeline)`` pairs in one unit, below each other, on a common time scale of ``width`` columns.

    Without colour, a box is a letter (F forward, B backward, I and W the halves of a split backward pass, U update),
    the microbatch if it fits, and dashes; a dot is idle time. With ``colour`` (ANSI codes), the background replaces the
    letter.
    """
    margin = len(f"rank {max(timeline.num_ranks for _, timeline in timelines) - 1} ")
    horizon = max(timeline.end for _, timeline in timelines)
    room = max(width - margin, 20)
    forward = forward_length(timelines[0][1])
    scale = room / horizon
    if forward:  # use whole columns for it if there is enough room
        columns = min(scale * forward, float(_WIDEST_FORWARD))
        scale = (int(columns) if columns >= 1 else columns) / forward
    lines = []
    for heading, timeline in timelines:
        lines.append(f"{heading}: {title(timeline)}" if heading else title(timeline))
        for rank, spans in enumerate(timeline.ranks):
            lines.append(
                f"rank {rank}".ljust(margin) + _row(spans, scale, round(horizon * scale), colour)
            )
        lines.append("")
    return "\n".join([*lines, _legend(shown_kinds(timelines), colour, has_later_stages(timelines))])


def _row(
    spans: tuple[Span, ...],
    scale: float,
    columns: int,
    colour: bool,
) -> str:
    chunks = sorted({span.action.stage for span in spans})
    cells = [" " if colour else "."] * columns
    for span in spans:
        first = round(span.start * scale)
        last = round(span.end * scale)
        if last <= first:
            continue
        cells[first:last] = _box(
            span,
            last - first,
            colour,
            bool(chunks.index(span.action.stage)),
        )
    return "".join(cells)


def _box(span: Span, columns: int, colour: bool, later: bool) -> list[str]:
    letter = LOOKS[span.action.kind].letter
    number = str(span.action.microbatch)
    if not colour:
        text = letter + number if len(number) < columns else letter
        return list(text.ljust(columns, "-"))
    text = number if len(number) <= columns else ""
    # A thin bar separates neighbours of one colour, if the number leaves room for it.
    text = ("▏" + text if len(text) < columns else text).ljust(columns)
    cells = list(text)
    cells[0] = f"\x1b[48;5;{LOOKS[span.action.kind].backgrounds[later]};38;5;231m" + cells[0]
    cells[-1] += "\x1b[0m"
    return cells


def _legend(shown: Sequence[Kind], colour: bool, later: bool) -> str:
    if colour:
        parts = [
            f"\x1b[48;5;{LOOKS[kind].backgrounds[0]}m  \x1b[0m {LOOKS[kind].label}"
            for kind in shown
        ]
        return "   ".join(
            [*parts, *(["lighter: a rank's later stages"] if later else []), "blank: idle"]
        )
    return "   ".join([*(f"{LOOKS[kind].letter} {LOOKS[kind].label}" for kind in shown), ". idle"])
