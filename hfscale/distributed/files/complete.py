"""Write and read the file that marks a directory as completely written; it holds the sizes and checksums of the other
files.

The marker is written after all other files are on disk, and gets its name by a rename. A process that is killed at any
moment therefore leaves a directory with a correct marker or without one. Checksums are CRC-32: they always detect one
flipped bit, or a run of up to 32 flipped bits.
"""

import json
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .directories import sync

MARK = "complete.json"
_BLOCK = 1 << 20  # bytes read at a time, which fit into a core's cache


@dataclass(frozen=True)
class FileSum:
    """Hold the size and checksum of one file."""

    size: int  # bytes
    crc: int  # CRC-32

    @classmethod
    def of_file(cls, path: Path) -> "FileSum":
        """Read a file and return its size and checksum."""
        size = 0
        crc = 0
        block = memoryview(bytearray(_BLOCK))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                size = size + count
                crc = zlib.crc32(block[:count], crc)
        return cls(size, crc)


@dataclass(frozen=True)
class Mark:
    """Hold the contents of the marker file of a complete directory: the files' sizes and checksums, the step, and the
    run.
    """

    written: float  # time at which the marker was written, in seconds since 1970
    files: dict[str, FileSum]  # sizes and checksums by file name
    step: int | None = None  # the training step at which the directory was saved
    # the run's id; ``None`` if an earlier version of hfscale wrote the marker
    run: str | None = None


def write_synced(path: Path, content: bytes) -> FileSum:
    """Write a small file, and fsync it; return its size and checksum."""
    path.write_bytes(content)
    sync(path)
    return FileSum(len(content), zlib.crc32(content))


def mark_complete(
    directory: Path,
    files: dict[str, FileSum],
    step: int | None = None,
    run: str | None = None,
) -> None:
    """Write the marker file that declares ``directory`` complete; all ``files`` must be on disk already."""
    sums = {
        name: [
            file.size,
            file.crc,
        ]
        for name, file in sorted(files.items())
    }
    told = {"written": time.time(), "step": step, "run": run, "files": sums}
    fresh = directory / f".{MARK}"
    write_synced(fresh, json.dumps(told, indent=1).encode())
    fresh.rename(directory / MARK)
    sync(directory)


def read_mark(directory: Path) -> Mark:
    """Read the marker file of a complete directory.

    Raises:
        CheckpointError: the marker is missing or damaged. The caller puts the directory's name before the error's text.
    """
    try:
        told: Any = json.loads((directory / MARK).read_bytes())
        files = {
            str(name): FileSum(int(size), int(crc)) for name, (size, crc) in told["files"].items()
        }
        step = told.get("step")
        run = told.get("run")
        return Mark(
            float(told["written"]),
            files,
            None if step is None else int(step),
            run,
        )
    except FileNotFoundError as error:
        raise CheckpointError("is incomplete: the save was interrupted") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"has a damaged {MARK} ({error})") from error


def size_problems(directory: Path, mark: Mark) -> list[str]:
    """Return one text for each file that is missing or has another size than ``mark`` says; the files are not read."""
    found = []
    for name, file in mark.files.items():
        try:
            if Path(name).name != name:
                found.append(f"{MARK} names {name}, which is missing")
            elif (size := (directory / name).stat().st_size) != file.size:
                found.append(f"{name} has {size:,} of {file.size:,} bytes")
        except OSError:
            found.append(f"{name} is missing")
    return found


def content_problems(directory: Path, mark: Mark, names: Iterable[str]) -> list[str]:
    """Return one text for each of the files ``names`` whose checksum differs from that in ``mark``, or which cannot be
    read.
    """
    found = []
    for name in names:
        try:
            if FileSum.of_file(directory / name) != mark.files[name]:
                found.append(f"{name} was changed after it was written: its checksum differs")
        except OSError as error:
            found.append(f"{name} cannot be read ({error})")
    return found
