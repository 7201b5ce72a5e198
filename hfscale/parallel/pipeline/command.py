"""``hfscale schedule``: see a pipeline schedule before it runs, and beside it how it ran."""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from ...errors import ConfigError
from ...schedules import ASYNCHRONOUS, SCHEDULES, default_virtual_stages
from .chrome_trace import last_whole_step, read_runs, write_trace
from .communicators import simulate_communicators
from .csv_table import read_csv, write_csv
from .draw import draw
from .orders import order
from .simulate import DEFAULT_COSTS, Costs, simulate
from .terminal import render
from .timeline import KINDS, Order, Timeline


def run_schedule(arguments: argparse.Namespace) -> int:
    """Carry out one ``hfscale schedule``."""
    measured = _measured(arguments.trace, arguments.step)
    planned_order, name, microbatches = _asked(arguments, measured)
    if measured:
        planned_order = _as_measured(planned_order, measured)
    costs = measured_costs(measured) if measured else DEFAULT_COSTS
    planned = simulate(planned_order, costs, name, microbatches)
    if arguments.transfer:
        if arguments.transfer < 0:
            raise ConfigError(f"--transfer {arguments.transfer} is impossible: use a time of at least 0")
        costs = replace(costs, communication=arguments.transfer * costs.forward)
        planned = simulate_communicators(planned_order, costs, name, microbatches)
    shown = [("", planned)]
    if measured:
        planned = replace(planned, unit=measured.unit)
        if measured.num_ranks != planned.num_ranks:
            raise ConfigError(
                f"{arguments.trace} has {measured.num_ranks} ranks and the plan {planned.num_ranks}: "
                f"use --pp {measured.num_ranks}"
            )
        measured = replace(measured, name=measured.name or name, microbatches=measured.microbatches or microbatches)
        shown = [("planned", planned), ("measured", measured)]
    for path in filter(None, (arguments.csv, arguments.save_trace)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: {path.parent} is not a folder")
    if arguments.out:  # first: it may refuse
        draw(arguments.out, shown)
    if arguments.csv:
        write_csv(planned_order, arguments.csv)
    if arguments.save_trace:
        write_trace(arguments.save_trace, planned)
    width = arguments.width or shutil.get_terminal_size((100, 24)).columns
    colour = arguments.color == "always" or (arguments.color == "auto" and sys.stdout.isatty())
    print(render(shown, width, colour))
    for path in filter(None, (arguments.csv, arguments.save_trace, arguments.out)):
        print(f"wrote {path}")
    return 0


def _measured(trace: Path | None, step: int | None) -> Timeline | None:
    """The step to draw of a recorded run."""
    if trace is None:
        if step is not None:
            raise ConfigError(f"--step {step} chooses from a recorded run: give its --trace as well")
        return None
    runs = read_runs(trace)
    if step is None:
        return last_whole_step(runs)
    if step - 1 not in runs:
        raise ConfigError(f"--step {step} is not in {trace}: use one of {', '.join(str(run + 1) for run in runs)}")
    return runs[step - 1]


def _as_measured(planned: Order, measured: Timeline) -> Order:
    """The order with what a run has besides it, and without what it has not: updates, and backward passes."""
    kinds = {span.action.kind for _, span in measured.spans()}
    if kinds == {"forward"}:
        return tuple(tuple(a._replace(paired=False) for a in row if a.kind == "forward") for row in planned)
    if len(planned) != measured.num_ranks or any(action.kind == "update" for row in planned for action in row):
        return planned
    updates = [[span.action for span in spans if span.action.kind == "update"] for spans in measured.ranks]
    return tuple((*row, *after) for row, after in zip(planned, updates, strict=True))


def measured_costs(timeline: Timeline) -> Costs:
    """The mean duration of each kind of action in a run: what its plan should be simulated with.

    Kinds that did not run keep the default's proportion to a forward.
    """
    lengths: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _, span in timeline.spans():
        lengths[span.action.kind].append(span.end - span.start)
    if not lengths["forward"]:
        raise ConfigError("a trace without forwards cannot be compared with a plan")
    forward = sum(lengths["forward"]) / len(lengths["forward"])
    found = {
        kind: sum(values) / len(values) if values else DEFAULT_COSTS.of(kind) * forward
        for kind, values in ((kind, lengths[kind]) for kind in KINDS)
    }
    return Costs(**found)


def _asked(arguments: argparse.Namespace, measured: Timeline | None) -> tuple[Order, str, int]:
    """The order to draw, its name, and the microbatches of one step."""
    known = measured is not None and (measured.name in SCHEDULES or measured.name.endswith(".csv"))
    schedule = arguments.schedule or (measured.name if measured and known else "1f1b")
    pp_size, microbatches, virtual = arguments.pp, arguments.microbatches, arguments.virtual_stages
    if measured:
        pp_size = pp_size or measured.num_ranks
        microbatches = microbatches or measured.num_microbatches
        virtual = virtual or measured.virtual_stages
    if schedule.endswith(".csv"):
        found = read_csv(Path(schedule))
        counted = simulate(found)
        pp_size, microbatches = pp_size or counted.num_ranks, microbatches or counted.num_microbatches
        virtual = virtual or counted.virtual_stages
    for flag, value in (("--pp", pp_size), ("--microbatches", microbatches)):
        if value is None:
            raise ConfigError(f"{flag} is missing: say how many, as in --pp 4 --microbatches 8")
    virtual = virtual or (
        1 if schedule.endswith(".csv") or schedule not in SCHEDULES else default_virtual_stages(schedule)
    )
    steps = arguments.steps or (3 if schedule == "pipedream_2bw" else 1)
    if measured and schedule in ASYNCHRONOUS and not arguments.steps:
        run = 1 + max(span.action.microbatch for _, span in measured.spans() if span.action.kind == "forward")
        steps = max(1, run // microbatches)
    return order(schedule, pp_size, microbatches, virtual, steps), schedule, microbatches
