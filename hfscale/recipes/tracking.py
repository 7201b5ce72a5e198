"""Where a run's numbers go besides ``metrics.jsonl``: TensorBoard, W&B and others by Accelerate's trackers, or CSV."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from .schema import RecipeError


class CsvTracker(GeneralTracker):
    """``metrics.csv``: a row for each step that has numbers, and a column for each kind of number."""

    name = "csv"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path) -> None:
        super().__init__()
        self.path = Path(logging_dir) / "metrics.csv"
        self._rows: list[dict[str, Any]] = []

    @property
    def tracker(self) -> Path:
        """What the numbers are in."""
        return self.path

    def go_on(self, step: int) -> None:
        """Go on behind ``step`` of an earlier process."""
        if self.path.is_file():
            with self.path.open(newline="", encoding="utf-8") as stream:
                self._rows = [row for row in csv.DictReader(stream) if int(row["step"]) <= step]

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Add to the row of ``step``; the file is whole after each."""
        if not self._rows or int(self._rows[-1]["step"]) != step:
            self._rows.append({"step": step})
        self._rows[-1].update(values)
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        with self.path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, columns, restval="")
            writer.writeheader()
            writer.writerows(self._rows)


def tracker_names() -> list[str]:
    """What a recipe may name, installed or not."""
    return sorted([*map(str, LOGGER_TYPE_TO_CLASS), CsvTracker.name])


def check_trackers(names: Sequence[str]) -> None:
    """Refuse what could not be tracked, before anything is loaded.

    Raises:
        RecipeError: a name is unknown, or its package is not installed.
    """
    known, there = tracker_names(), [*map(str, get_available_trackers()), CsvTracker.name]
    for name in names:
        if name not in known:
            raise RecipeError(f"tracking names {name!r}, which Accelerate has no tracker for: use {', '.join(known)}")
        if name not in there:
            raise RecipeError(f"tracking={name} needs a package that is not installed: pip install {name}")


def start_trackers(names: Iterable[str], run: str, directory: Path, recipe: Mapping[str, Any]) -> list[Any]:
    """Trackers of a run, told its recipe; on the main process."""
    made = []
    for name in names:
        kind: Any = CsvTracker if name == CsvTracker.name else LOGGER_TYPE_TO_CLASS[name]
        place = directory if kind is CsvTracker else directory / "tracking"
        folder = {"logging_dir": str(place)} if kind.requires_logging_directory else {}
        tracker = kind(run, **folder)
        tracker.start()
        tracker.store_init_configuration(_flat(recipe))
        made.append(tracker)
    return made


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``training.steps`` and so on, of types that every tracker takes."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            plain = isinstance(value, bool | int | float | str)
            found[f"{prefix}{name}"] = value if plain else json.dumps(value, default=str)
    return found
