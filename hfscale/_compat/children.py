"""Let daemon processes start processes, which Python does not allow."""

import multiprocessing
from typing import Any


def may_have_children() -> None:
    """Let this daemon process start others (loaders' workers)."""
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
