"""Find the lines of the user's code, and of hfscale's, in a stack or a traceback."""

import os
import sysconfig
import traceback
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_PACKAGE = str(Path(__file__).parents[1])
_PLACES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
# Libraries may also be elsewhere: in their source tree (editable installs), or in a directory of PYTHONPATH.
_SPECS = [find_spec(name) for name in ("torch", "transformers", "accelerate", "peft", "trl")]
_FOLDERS = [os.path.dirname(spec.origin) for spec in _SPECS if spec is not None and spec.origin]
_LIBRARIES = tuple({os.path.join(folder, "") for folder in (*_PLACES, *_FOLDERS)})


def user_line_of(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback."""
    return next(
        filter(None, innermost_lines(reversed(list(traceback.walk_tb(trace))))), "an unknown place"
    )


def innermost_lines(frames: Iterable[tuple[FrameType, int]]) -> tuple[str, str]:
    """Return the innermost line of the user's code, and the innermost line of hfscale's code.

    Each of ``frames`` comes with its line number, the innermost frame first.
    """
    place = ""
    inside = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            inside = inside or _user_line(
                frame, line, Path("hfscale", Path(file).relative_to(_PACKAGE))
            )
        elif not file.startswith((*_LIBRARIES, "<")):
            place = _user_line(frame, line, Path(file).name)
            break
    return place, inside


def _user_line(frame: FrameType, line: int, file: Any) -> str:
    return f"{file}:{line} in {frame.f_code.co_name}"
