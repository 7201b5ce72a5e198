"""Find the file that arguments of :func:`hfscale.from_pretrained` name, without waiting for an unreachable Hub."""

import os
from collections.abc import Mapping
from typing import Any

from .._compat.hub import hub_is_away
from ..distributed.files.sources import ask_added


def located(path: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the path and the arguments of ``from_pretrained``. For a format that is one file (GGUF), return the file's
    directory, and the argument with which transformers loads the file. Raise :class:`CheckpointError` if the file is
    missing or damaged.
    """
    found: tuple[Any, dict[str, Any]] | None = ask_added("locate", path, kwargs)
    return found or (path, dict(kwargs))


def reachable(path: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kwargs``, with ``local_files_only`` if the Hub cannot be reached, for which transformers would wait."""
    waits = not os.path.exists(path) and "local_files_only" not in kwargs and hub_is_away()
    return {**kwargs, "local_files_only": True} if waits else dict(kwargs)
