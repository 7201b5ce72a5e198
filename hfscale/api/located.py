"""Find the file that arguments of :func:`hfscale.from_pretrained` name, and ask no Hub that is away."""

import os
from collections.abc import Mapping
from typing import Any

from .._compat.hub import hub_is_away
from ..distributed.files.sources import ask_added


def located(path: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the path and the arguments of ``from_pretrained``; of an added source that is one file, its directory and
    the argument by which transformers finds it. Raise :class:`CheckpointError` if it is not there, or damaged.
    """
    found: tuple[Any, dict[str, Any]] | None = ask_added("locate", path, kwargs)
    return found or (path, dict(kwargs))


def reachable(path: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kwargs``, with ``local_files_only`` if the Hub cannot be reached: transformers would wait for it."""
    waits = not os.path.exists(path) and "local_files_only" not in kwargs and hub_is_away()
    return {**kwargs, "local_files_only": True} if waits else dict(kwargs)
