"""Read and write schedules as CSV files, in the format of ``torch.distributed.pipelining``.

The file has one row per rank and one cell per action: stage, letter and microbatch, for example ``0F3``. ``F`` is a
forward pass, ``B`` a full backward pass, ``I`` a backward pass for the input, and ``W`` one for the weights.
``(0F3;3B1)OVERLAP_F_B`` is a forward and a backward pass that run together. In an empty cell the rank waits. ``U`` is
an update of the weights: only asynchronous schedules have updates, and torch's engine does not read them.
"""

import csv
import re
from collections import Counter
from pathlib import Path

from ...errors import ConfigError
from .timeline import LETTERS, Action, Kind, Order, pieces_of

_KIND = {letter: kind for kind, letter in LETTERS.items()}
_CELL = re.compile(r"(\d+)([FBIWU])(\d+)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def write_csv(order: Order, path: Path) -> None:
    """Write ``order`` to the CSV file ``path``."""
    with open(path, "w", newline="") as file:
        for actions in order:
            pieces = [
                [f"{a.stage}{LETTERS[a.kind]}{a.microbatch}" for a in piece]
                for piece in pieces_of(actions)
            ]
            csv.writer(file).writerow(
                f"({';'.join(cells)})OVERLAP_F_B" if len(cells) > 1 else cells[0]
                for cells in pieces
            )


def read_csv(path: Path) -> Order:
    """Read an order from a CSV file.

    Raises:
        ConfigError: a cell is not an action, an action is missing or occurs twice, a stage is on several ranks, or the
            order would deadlock.
    """
    from .simulation import simulate  # imported here, because only this function needs it

    try:
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no schedule could be read from {path}: {error}; give the path of a CSV file that this process can read"
        ) from error
    if not rows:
        raise ConfigError(
            f"{path} has no rows: write one row per rank, with actions such as 0F0 and 0B0"
        )
    order = tuple(
        tuple(a for cell in row for a in _parse(cell, path, number))
        for number, row in enumerate(rows, 1)
    )
    _complete(order, path)
    simulate(order, name=str(path))
    return order


def _parse(cell: str, path: Path, row: int) -> list[Action]:
    text = cell.strip()
    if text in ("", "None"):
        return []
    if pair := _PAIR.fullmatch(text):
        actions = [
            action for part in pair.group(1).split(";") for action in _parse(part, path, row)
        ]
        return [
            action._replace(paired=index < len(actions) - 1) for index, action in enumerate(actions)
        ]
    if match := _CELL.fullmatch(text):
        stage, letter, microbatch = match.groups()
        return [Action(int(stage), _KIND[letter], int(microbatch))]
    raise ConfigError(
        f"{path}, row {row}: {text!r} is not an action: write stage, F, B, I or W, and microbatch, as in 0F3; "
        "sends and receives are added by hfscale"
    )


def _complete(order: Order, path: Path) -> None:
    home: dict[int, int] = {}
    seen: Counter[tuple[int, Kind, int]] = Counter()
    for rank, actions in enumerate(order):
        for action in actions:
            if home.setdefault(action.stage, rank) != rank:
                raise ConfigError(
                    f"{path}: stage {action.stage} is on rank {home[action.stage]} and on rank {rank}: write all "
                    "actions of a stage in the row of one rank"
                )
            if action.kind != "update":
                seen[action[:3]] += 1
    stages = sorted(home)
    microbatches = sorted({microbatch for _, kind, microbatch in seen if kind == "forward"})
    if stages != list(range(len(stages))) or microbatches != list(range(len(microbatches))):
        raise ConfigError(
            f"{path}: the stages {stages}, and the microbatches {microbatches} of the forward passes, must be numbered "
            "0, 1, 2 ... without gaps: renumber them"
        )
    if len(stages) % len(order):
        raise ConfigError(
            f"{path}: {len(stages)} stages do not divide evenly over {len(order)} ranks: give all ranks the same number"
        )
    counts: dict[tuple[int, int], tuple[int, ...]] = {
        (stage, index): tuple(
            seen.pop((stage, kind, index), 0) for kind in _KIND.values() if kind != "update"
        )
        for stage in stages
        for index in microbatches
    }
    for (stage, index), counted in counts.items():
        if counted not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            raise ConfigError(
                f"{path}: every stage needs one F and either one B, or one I and one W, of every microbatch, but "
                f"stage {stage} has F, B, I, W of microbatch {index} {counted} times: add or remove actions"
            )
    if seen:
        raise ConfigError(
            f"{path}: the action {sorted(seen)[0]} (stage, kind, microbatch) has no forward pass: add an F for its "
            "stage and microbatch"
        )
