"""Where a run's numbers go besides ``metrics.jsonl``: TensorBoard, W&B and others by Accelerate's trackers, or CSV."""

import csv
import io
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
        self._columns: list[str] = []
        self._row: dict[str, Any] = {}
        self._before = 0  # bytes before the last row, which more values of its step write again

    @property
    def tracker(self) -> Path:
        """What the numbers are in."""
        return self.path

    def go_on(self, step: int) -> None:
        """Go on behind ``step`` of an earlier process."""
        if self.path.is_file():
            done = [row for row in self._read(self.path.stat().st_size) if int(row["step"]) <= step]
            if done:
                self._columns, self._row = list(done[0]), {**done[-1], "step": int(done[-1]["step"])}
                self._write(done)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Add to the row of ``step``; the file is whole after each."""
        if self._row.get("step") != step:
            self._before, self._row = self.path.stat().st_size if self._columns else 0, {"step": step}
        self._row.update(values)
        added = [name for name in self._row if name not in self._columns]
        if added:  # a wider table is written from its beginning
            earlier = self._read(self._before)
            self._columns += added
            self._write([*earlier, self._row])
            return
        with self.path.open("r+", newline="", encoding="utf-8") as stream:
            stream.truncate(self._before)
            stream.seek(self._before)
            csv.DictWriter(stream, self._columns, restval="").writerow(self._row)

    def _read(self, until: int) -> list[dict[str, str]]:
        """The rows in the first so many bytes."""
        if not until:
            return []
        text = self.path.read_bytes()[:until].decode()
        return list(csv.DictReader(io.StringIO(text, newline="")))

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The file anew."""
        with self.path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows[:-1])
            stream.flush()
            self._before = self.path.stat().st_size
            writer.writerows(rows[-1:])


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
