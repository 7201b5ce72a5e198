"""Find the file that arguments of :func:`hfscale.from_pretrained` name, without waiting for an unreachable Hub."""

import os
from collections.abc import Mapping
from typing import Any

from .._compat.transformers.loading import FILE
from ..distributed.files.sources import ask_added


def located(path: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the path and the arguments of ``from_pretrained``. For a format that is one file (GGUF), return the file's
    directory, and the argument with which transformers loads the file. Raise :class:`CheckpointError` if the file is
    missing or damaged.
    """
    # A directory with a config.json is a whole checkpoint, not a single file.
    has_config = isinstance(path, str) and os.path.exists(
        os.path.join(path, kwargs.get("subfolder") or "", "config.json")
    )
    if has_config and FILE not in kwargs:
        return path, dict(kwargs)
    found: tuple[Any, dict[str, Any]] | None = ask_added("locate", path, kwargs)
    return found or (path, dict(kwargs))


def reachable(path: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kwargs``, with ``local_files_only`` if the Hub cannot be reached, so that transformers does not wait."""
    if os.path.exists(path) or "local_files_only" in kwargs:
        return dict(kwargs)
    from .._compat.hub import hub_is_away

    return {**kwargs, "local_files_only": True} if hub_is_away() else dict(kwargs)
