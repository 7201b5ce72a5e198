"""Find the GGUF file that arguments of :func:`hfscale.from_pretrained` name, in one of four ways."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from .. import errors
from .._compat.hub import hub_is_away
from .._compat.transformers.loading import HUB_ARGUMENTS
from ..checkpoint.stored_forms.scheme import OF_GGUF, method_of
from ..distributed.files.gguf_file import SUFFIX, GgufFile
from ..distributed.files.sources import gguf_in

_NOT_OF_FILES = ("subfolder", "trust_remote_code")  # of HUB_ARGUMENTS


def located(path: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the path and the arguments of ``from_pretrained``; of a GGUF file, its directory and ``gguf_file``.

    It may be given by its path, by ``gguf_file=``, a name in a directory or on the Hub, or a path, or by a directory
    that holds nothing else. Its header is looked at, before transformers reads it.

    Raises:
        CheckpointError: the file is not there, or damaged, or a directory has several.
    """
    file = _named(path, kwargs) if isinstance(path, str | os.PathLike) else None
    if file is None:
        return path, dict(kwargs)
    GgufFile(file)
    rest = {key: value for key, value in kwargs.items() if key not in ("subfolder", "gguf_file")}
    if (
        method_of(rest.get("quantization_config")) == OF_GGUF
    ):  # weights are plain values in any case
        del rest["quantization_config"]
    return str(file.parent), {**rest, "gguf_file": file.name}


def _named(path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> Path | None:
    given = Path(path)
    directory = given / (kwargs.get("subfolder") or "")
    name = kwargs.get("gguf_file")
    if name is None:
        if given.suffix == SUFFIX and given.is_file():
            return given
        return None if (directory / "config.json").exists() else _alone(directory)
    if Path(name).is_file():  # so it is in transformers
        return Path(name)
    if not given.exists() and not errors.written_like_a_path(str(path)):
        options = {key: value for key, value in kwargs.items() if key in HUB_ARGUMENTS}
        options = {key: value for key, value in options.items() if key not in _NOT_OF_FILES}
        within = {"subfolder": kwargs.get("subfolder") or ""}
        found = cached_file(str(path), name, **reachable(str(path), options), **within)
        return Path(str(found))
    if not (directory / name).is_file():
        raise errors.CheckpointError(
            f"gguf_file={str(name)!r} must be a file in {directory}, and is none: give the name of one, or its path"
        )
    return directory / name


def _alone(directory: Path) -> Path | None:
    files = gguf_in(directory)
    if len(files) > 1:
        raise errors.CheckpointError(
            f"{directory} must hold one GGUF file to be read by itself, got {len(files)} ({files[0].name}, for one): "
            "name one, gguf_file=, or give its path"
        )
    return files[0] if files else None


def reachable(path: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kwargs``, with ``local_files_only`` if the Hub cannot be reached: transformers would wait for it."""
    waits = not os.path.exists(path) and "local_files_only" not in kwargs and hub_is_away()
    return {**kwargs, "local_files_only": True} if waits else dict(kwargs)
