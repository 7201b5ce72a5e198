"""Order the actions of each rank, for every schedule; imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...config.schedules import ASYNCHRONOUS, SCHEDULES
from ...errors import ConfigError
from .csv_table import read_csv
from .several_stages import several_stages_order
from .timeline import Action, Order
from .versions import asynchronous_order, one_forward_one_backward

if TYPE_CHECKING:
    from ...config.parallel import ParallelConfig

_SINGLE = ("gpipe", "1f1b", *ASYNCHRONOUS)
_PAIRS = ("zbv", "dualpipev")


def order(schedule: str, pp_size: int, num_microbatches: int, virtual_stages: int = 1, steps: int = 1) -> Order:
    """Return, per rank, the sequence of its actions.

    ``gpipe`` (Huang et al. 2019), ``1f1b`` (PipeDream-Flush, Narayanan et al. 2021a), ``interleaved1f1b`` (PTD-P,
    Narayanan et al. 2021b), ``looped_bfs`` (breadth-first, Lamy-Poirier 2023), ``interleaved_zero_bubble`` (ZB-H1 over
    virtual stages) and ``zbv`` (Qi et al. 2023), ``dualpipev`` (DeepSeek 2025), ``pipedream`` (Narayanan et al. 2019),
    ``pipedream_2bw`` (Narayanan et al. 2021a), or the path of a CSV in torch's format (see :func:`read_csv`).

    Args:
        schedule: one of :data:`hfscale.config.schedules.SCHEDULES`, or the path of a ``.csv`` file.
        pp_size: ranks of the pipeline.
        num_microbatches: microbatches of one step.
        virtual_stages: stages per rank. Stage ``s`` lives on rank ``s % pp_size``; for ``zbv`` and ``dualpipev``, which
            take exactly two, on ranks ``0 .. p-1, p-1 .. 0``.
        steps: steps in a row; more than one only without a flush between them (the asynchronous schedules).

    Raises:
        ConfigError: the schedule cannot run with these numbers.
    """
    check(schedule, pp_size, num_microbatches, virtual_stages, steps)
    if schedule.endswith(".csv"):
        return _from_file(schedule, pp_size, num_microbatches, virtual_stages)
    if schedule in ASYNCHRONOUS:
        return asynchronous_order(schedule, pp_size, num_microbatches, steps)
    if schedule == "gpipe":
        return tuple(tuple(_gpipe(stage, num_microbatches)) for stage in range(pp_size))
    if schedule == "1f1b":  # torch's own listing starts the last stage at microbatch 1; what it runs is this
        return tuple(tuple(one_forward_one_backward(stage, pp_size, num_microbatches)) for stage in range(pp_size))
    return several_stages_order(schedule, pp_size, num_microbatches, virtual_stages)


def check(schedule: str, pp_size: int, num_microbatches: int, virtual_stages: int = 1, steps: int = 1) -> None:
    """Refuse numbers that ``schedule`` cannot run, naming those that it can.

    Raises:
        ConfigError: as said.
    """
    for name, value in (("pp_size", pp_size), ("num_microbatches", num_microbatches), ("steps", steps)):
        if value < 1:
            raise ConfigError(f"{name}={value} is impossible: use a whole number of at least 1")
    if schedule not in SCHEDULES and not schedule.endswith(".csv"):
        raise ConfigError(f"schedule {schedule!r} is unknown: use one of {', '.join(SCHEDULES)}, or a .csv file")
    valid = allowed_virtual_stages(schedule)
    if virtual_stages not in valid:
        values = str(valid[0]) if len(valid) == 1 else f"{valid[0]} or more"
        raise ConfigError(
            f"virtual_stages={virtual_stages} does not fit {schedule}: use {values}{_why_virtual(schedule)}"
        )
    least = {"dualpipev": 2 * pp_size, "pipedream_2bw": pp_size}.get(schedule, 1)
    if num_microbatches < least:
        raise ConfigError(
            f"num_microbatches={num_microbatches} is too few for {schedule} over pp_size={pp_size}: use {least} or more"
        )
    if schedule in ("interleaved1f1b", "interleaved_zero_bubble") and not _whole_rounds(num_microbatches, pp_size):
        below = next(m for m in range(num_microbatches - 1, 0, -1) if _whole_rounds(m, pp_size))
        above = next(
            m for m in range(num_microbatches + 1, 2 * num_microbatches + pp_size) if _whole_rounds(m, pp_size)
        )
        raise ConfigError(
            f"num_microbatches={num_microbatches} does not divide into the {num_microbatches // pp_size} rounds of "
            f"{schedule} over pp_size={pp_size}: use {below} or {above} (any multiple of pp_size will do)"
        )
    if steps > 1 and schedule not in ASYNCHRONOUS:
        raise ConfigError(f"steps={steps}: {schedule} ends every step with a flush, so its steps look alike: use 1")


def check_layout(layout: "ParallelConfig") -> None:
    """Refuse a layout whose schedule cannot run its stages and microbatches; a file is checked where it is read.

    Raises:
        ConfigError: as :func:`check`.
    """
    schedule, ranks = str(layout.pipeline_schedule), layout.pp
    if ranks > 1 and not schedule.endswith(".csv"):
        check(schedule, ranks, layout.num_microbatches or 2 * ranks, int(layout.virtual_stages or 1))


def allowed_virtual_stages(schedule: str) -> range:
    """Return the numbers of stages per rank that ``schedule`` can run with."""
    if schedule in _SINGLE:
        return range(1, 2)
    if schedule in _PAIRS:
        return range(2, 3)
    return range(2 if schedule in ("interleaved1f1b", "looped_bfs") else 1, 1 << 16)


def _why_virtual(schedule: str) -> str:
    if schedule in _PAIRS:
        return " (the model goes down the ranks and up again)"
    if schedule in _SINGLE:
        return " (it keeps one stage per rank; interleaved1f1b and looped_bfs take several)"
    return " (with one stage per rank it is " + {"interleaved1f1b": "1f1b", "looped_bfs": "gpipe"}[schedule] + ")"


def _whole_rounds(num_microbatches: int, pp_size: int) -> bool:
    return num_microbatches % max(1, num_microbatches // pp_size) == 0


def _gpipe(stage: int, num_microbatches: int) -> list[Action]:
    forwards = [Action(stage, "forward", index) for index in range(num_microbatches)]
    return forwards + [Action(stage, "backward", index) for index in range(num_microbatches)]


def _from_file(path: str, pp_size: int, num_microbatches: int, virtual_stages: int) -> Order:
    found = read_csv(Path(path))
    stages = 1 + max(action.stage for actions in found for action in actions)
    microbatches = 1 + max(action.microbatch for actions in found for action in actions if action.kind == "forward")
    if (len(found), stages, microbatches) != (pp_size, pp_size * virtual_stages, num_microbatches):
        raise ConfigError(
            f"{path} is a schedule of {len(found)} ranks, {stages} stages and {microbatches} microbatches: use "
            f"pp_size={len(found)}, virtual_stages={stages // len(found)}, num_microbatches={microbatches}"
        )
    return found
