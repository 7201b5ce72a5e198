"""Find the file that arguments of :func:`hfscale.from_pretrained` name, and ask no Hub that is away."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._compat.transformers.loading import FILE
from ..distributed.files.sources import ask_added
from ..distributed.files.weight_files import weight_files


def located(path: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the path and the arguments of ``from_pretrained``; of an added source that is one file, its directory and
    the argument by which transformers finds it. Raise :class:`CheckpointError` if it is not there, or damaged.
    """
    found: tuple[Any, dict[str, Any]] | None = None
    if FILE in kwargs or not _is_plain(path, kwargs.get("subfolder")):
        found = ask_added("locate", path, kwargs)
    return found or (path, dict(kwargs))


def _is_plain(path: Any, subfolder: str | None) -> bool:
    """Return whether a directory has weights that transformers reads."""
    is_path = isinstance(path, str | os.PathLike) and os.path.isdir(path)
    return is_path and bool(weight_files(Path(path, subfolder or "")))


def reachable(path: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kwargs``, with ``local_files_only`` if the Hub cannot be reached: transformers would wait for it."""
    if os.path.exists(path) or "local_files_only" in kwargs:
        return dict(kwargs)
    from .._compat.hub import hub_is_away

    return {**kwargs, "local_files_only": True} if hub_is_away() else dict(kwargs)
