"""Let daemon processes start child processes, which Python forbids."""

import multiprocessing
from typing import Any


def may_have_children() -> None:
    """Let this daemon process start others (loaders' workers)."""
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
