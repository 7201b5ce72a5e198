"""Processes that daemons start, which Python does not allow."""

import multiprocessing
from typing import Any


def may_have_children() -> None:
    """Let this process start others (loaders' workers), though it ends with the one that started it."""
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
