"""The report that a benchmark of two processes writes."""

import json
import platform
from pathlib import Path
from types import ModuleType
from typing import Any


def write_report(path: Path | None, results: list[dict[str, Any]], *libraries: ModuleType) -> None:
    """Write results with the machine and the versions of ``libraries``; nothing where ``path`` is ``None``."""
    versions = {library.__name__: library.__version__ for library in libraries}
    report = {
        "machine": f"{platform.machine()}, 2 processes x 1 thread, gloo",
        "versions": {**versions, "python": platform.python_version()},
        "results": results,
    }
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")
