"""Find GGUF files, and choose how to read their weights: by slices or, for other architectures, all at once by
transformers.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import cached_file

from ... import errors
from ..._compat.transformers.classes import model_of, stock_class
from ..._compat.transformers.gguf import config_of_gguf, tokenizer_of_gguf, weights_of_gguf
from ..._compat.transformers.loading import FILE, HUB_ARGUMENTS
from ...api.located import reachable
from ...checkpoint.stored_forms.scheme import OF_GGUF, method_of
from ...distributed.files.dequantized import WordsInMemory
from ...distributed.files.pieces import Piece, TensorInPieces
from ...distributed.files.reader import TensorOnDisk
from ...distributed.files.sources import AddedSource, FileWithConfig, Source
from ...distributed.files.weight_files import weight_files
from .gguf_file import SUFFIX, GgufFile, begins_like_one
from .gguf_names import BY_SLICES, as_transformers

_log = logging.getLogger(__name__)
# The HUB_ARGUMENTS that do not apply to GGUF files.
_NOT_OF_FILES = ("subfolder", "trust_remote_code")


@dataclass(frozen=True)
class GgufSource(FileWithConfig):
    """Describe a GGUF file from which weights, config and tokenizer are read."""

    def describe(self) -> str:
        """Return a phrase that describes the file; raise :class:`CheckpointError` for a damaged file."""
        return f"{self.form} ({GgufFile(self.file).describe()})"

    def open(self, model: Any = None) -> dict[str, TensorOnDisk]:
        """Return lazy tensors by their names in a full ``model``; without a model, by the names in the file."""
        file = GgufFile(self.file)
        return file.slices() if model is None else as_transformers(file, model)

    def fitting(self, model: Any, tells: bool = False) -> Source:
        """Return a source of the weights for ``model``: this source if the file's architecture can be read by slices,
        else a source of all weights as transformers reads them.

        With ``tells``, log a warning in the second case, because every rank then reads the full file.
        """
        architecture = GgufFile(self.file).architecture
        if architecture in BY_SLICES:
            return self
        if tells:
            _log.warning(
                "%s: every rank reads the whole file, because hfscale cannot read its architecture (%s) in slices, "
                "only these: %s",
                self.file,
                architecture,
                ", ".join(BY_SLICES),
            )
        tensors = weights_of_gguf(stock_class(model), self.file, model.config, model.dtype)
        return Source(self.form, self.directory, lambda _: _in_memory(tensors))

    def build_model(self) -> Any:
        """Return the full model of the file's config on the meta device."""
        return model_of(config_of_gguf(self.file))

    def write_small_files(self, model: Any, target: Path) -> None:
        """Write the config of ``model``, and the tokenizer in the file, into the directory ``target``."""
        model.config.save_pretrained(target)
        try:
            tokenizer_of_gguf(self.file).save_pretrained(target)
        except Exception as error:  # of any type: transformers' errors about tokens
            _log.warning(
                "%s: transformers cannot make a tokenizer of this file (%s): copy the model's own tokenizer next to "
                "the weights",
                self.file,
                errors.first_line(error),
            )


class _Gguf(AddedSource):
    def find(self, path: Path) -> Source | None:
        if path.is_file() and (path.suffix == SUFFIX or begins_like_one(path)):
            return _source(path)
        files = _files_in(path)
        return _source(files[0]) if len(files) == 1 else None

    def locate(self, path: Any, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Find a GGUF file that is given by its path, by ``gguf_file=`` (a path, or a name in a directory or on the
        Hub), or by a directory that contains nothing else. The file's header is checked before transformers reads the
        file.
        """
        file = _named(path, kwargs) if isinstance(path, str | os.PathLike) else None
        if file is None:
            return None
        GgufFile(file)
        rest = {key: value for key, value in kwargs.items() if key not in ("subfolder", FILE)}
        # The weights are always dequantized.
        if method_of(rest.get("quantization_config")) == OF_GGUF:
            del rest["quantization_config"]
        return str(file.parent), {**rest, FILE: file.name}


GGUF = _Gguf()


def _source(path: Path) -> GgufSource:
    return GgufSource("a GGUF file", path.parent, lambda _: {}, path)


def _files_in(directory: Path) -> list[Path]:
    """Return the GGUF files in a directory; none if the directory has other weights."""
    found = sorted(directory.glob(f"*{SUFFIX}")) if directory.is_dir() else []
    return [] if found and weight_files(directory) else found


def _in_memory(tensors: Mapping[str, Tensor]) -> dict[str, TensorOnDisk]:
    found: dict[str, TensorOnDisk] = {}
    for name, tensor in tensors.items():
        whole = Piece((0,) * tensor.ndim, WordsInMemory(tensor, ()))
        found[name] = TensorInPieces(name, tensor.shape, tensor.dtype, [whole])
    return found


def _named(path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> Path | None:
    given = Path(path)
    directory = given / (kwargs.get("subfolder") or "")
    name = kwargs.get(FILE)
    if name is None:
        if given.suffix == SUFFIX and given.is_file():
            return given
        return None if (directory / "config.json").exists() else _alone(directory)
    if Path(name).is_file():  # transformers accepts a path too
        return Path(name)
    if not given.exists() and not errors.written_like_a_path(str(path)):
        options = {key: value for key, value in kwargs.items() if key in HUB_ARGUMENTS}
        options = {key: value for key, value in options.items() if key not in _NOT_OF_FILES}
        within = {"subfolder": kwargs.get("subfolder") or ""}
        found = cached_file(str(path), name, **reachable(str(path), options), **within)
        return Path(str(found))
    if not (directory / name).is_file():
        raise errors.CheckpointError(
            f"gguf_file={str(name)!r} must be a file in {directory}, but no such file exists: give the name of a file "
            "in this directory, or the path of a file"
        )
    return directory / name


def _alone(directory: Path) -> Path | None:
    files = _files_in(directory)
    if len(files) > 1:
        raise errors.CheckpointError(
            f"{directory} must hold exactly one GGUF file, got {len(files)} ({files[0].name}, for example): name the "
            "file with gguf_file=, or give its path"
        )
    return files[0] if files else None
