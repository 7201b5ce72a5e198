"""Find the weights of a model in a directory that another trainer has written, in a form that is read by its slices.

=========================  ==================================================  ==============================
form                       files                                               who writes it
=========================  ==================================================  ==============================
slices in safetensors      ``shard-00001-model-00001-of-00001.safetensors``    transformers' distributed saving
distributed checkpoint     ``.metadata``, ``__0_0.distcp``                     FSDP2 in plain loops, torchtitan
  beside others            ``pytorch_model_fsdp_0/``                           Accelerate, Trainer
state dict of FSDP         ``pytorch_model_fsdp.bin``                          Accelerate, Trainer
plain, without a config    ``model.safetensors``, ``pytorch_model.bin``        Accelerate's ``save_state``
=========================  ==================================================  ==============================

A further form is an entry of :data:`_FORMS`, or an :class:`AddedSource` of an extension. Plain files (safetensors,
``pytorch_model.bin``) are transformers' own, and come first: :mod:`.weight_files`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...extensions import all_provided
from .dcp import METADATA, open_checkpoint
from .reader import TensorOnDisk
from .sliced_files import open_slices
from .torch_file import TorchFile
from .weight_files import SLICED, open_tensors, weight_files

_CONFIG = "config.json"
_OF_MODELS = ("model", "pytorch_model")  # not the shards of a state
_FULL = "pytorch_model_fsdp.bin"
_OF_MEGATRON = "common.pt"  # whose distributed checkpoints have layers stacked, under other names


@dataclass(frozen=True)
class Source:
    """Describe where weights lie."""

    form: str  # in words
    directory: Path  # that has the files
    reader: Callable[[Path], dict[str, TensorOnDisk]]

    def describe(self) -> str:
        """Return what it is, in words."""
        return self.form

    def open(self, model: Any = None) -> dict[str, TensorOnDisk]:
        """Return lazy tensors by their names in a full ``model``, and in its order of rows; without one, to describe
        them.
        """
        tensors = self.reader(self.directory)
        renamed: dict[str, TensorOnDisk] | None = ask_added(
            "rename", tensors, None if model is None else model.config
        )
        return tensors if renamed is None else renamed

    def fitting(self, model: Any, tells: bool = False) -> "Source":
        """Return the source as it is read for a full ``model`` on the meta device; ``tells`` of what all ranks read."""
        return self


@dataclass(frozen=True)
class FileWithConfig(Source, ABC):
    """Describe a file that has its model's config beside the weights."""

    file: Path

    @abstractmethod
    def build_model(self) -> Any:
        """Return the full model that :attr:`file` describes, on the meta device."""

    @abstractmethod
    def write_small_files(self, model: Any, target: Path) -> None:
        """Write what :attr:`file` has beside weights: the config of the ``model``, a tokenizer."""


class AddedSource:
    """Find and read weights of another program, as an entry of the slot ``sources`` of an extension: each method
    returns ``None`` for what it does not know.
    """

    def find(self, path: Path) -> Source | None:
        """Return how the weights in a directory, or a file, are read."""
        return None

    def find_optimizer(self, directory: Path) -> Any:
        """Return the :class:`~hfscale.checkpoint.foreign_optimizer.OptimizerSource` in a directory."""
        return None

    def locate(self, path: Any, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Return the directory, and transformers' arguments, of a file that arguments of ``from_pretrained`` name."""
        return None

    def recognize(self, source: Path) -> str | None:
        """Return what another program wrote to a file or directory, or just below it, and the tool that converts it."""
        return None

    def rename(
        self, tensors: Mapping[str, TensorOnDisk], config: Any
    ) -> dict[str, TensorOnDisk] | None:
        """Return tensors of another program by transformers' names, in its order of rows; ``config``: of the model, or
        ``None`` if only names are asked for.
        """
        return None


def ask_added(question: str, *given: Any) -> Any:
    """Return the first answer of added sources to one of their methods; ``None`` where none has one."""
    answers = (getattr(source, question)(*given) for source in all_provided("sources"))
    return next((answer for answer in answers if answer is not None), None)


@dataclass(frozen=True)
class _Form:
    words: str
    pattern: str  # of a file that such a directory has
    reader: Callable[[Path], dict[str, TensorOnDisk]]


_FORMS = (
    _Form("slices of transformers' distributed saving", SLICED, open_slices),
    _Form("a distributed checkpoint of torch's (DCP)", METADATA, open_checkpoint),
    _Form(
        "FSDP's shards (DCP) beside a state", "pytorch_model_fsdp_0/" + METADATA, open_checkpoint
    ),
    _Form("FSDP's full state dict", _FULL, lambda directory: TorchFile(directory / _FULL).slices()),
)


def find_source(path: Path) -> Source | None:
    """Return how the weights in a directory, or in a file, are read where transformers does not read them by slices;
    ``None`` if it does, or has none.
    """
    if (path / _OF_MEGATRON).exists():
        return None
    if plain := weight_files(path) if path.is_dir() else []:
        by_host = (path / _CONFIG).exists() or not plain[0].name.startswith(_OF_MODELS)
        return None if by_host else Source("weights alone", path, _open_plain)
    for form in _FORMS:
        for found in sorted(path.glob(form.pattern))[:1]:
            return Source(form.words, found.parent, form.reader)
    added: Source | None = ask_added("find", path)
    return added


def _open_plain(directory: Path) -> dict[str, TensorOnDisk]:
    return open_tensors(weight_files(directory))


def form_of(directory: Path) -> str | None:
    """Return in words the form of the weights in a directory that are read; ``None`` if it has none."""
    if files := weight_files(directory):
        return "pytorch_model.bin" if files[0].suffix == ".bin" else "safetensors"
    source = find_source(directory)
    return None if source is None else source.form


def has_weights(directory: Path) -> bool:
    """Return whether a directory holds weights that are read: plain ones, or another trainer's."""
    return form_of(directory) is not None


def open_weights(directory: Path) -> dict[str, TensorOnDisk]:
    """Return a lazy tensor for every weight in a directory, by the model's names; none if it has none."""
    if files := weight_files(directory):
        return open_tensors(files)
    source = find_source(directory)
    return {} if source is None or isinstance(source, FileWithConfig) else source.open()


def written_elsewhere(source: Path) -> str | None:
    """Return what another program wrote to a file or directory, or just below it, and the tool that converts it."""
    recognized: str | None = ask_added("recognize", source)
    return recognized


def refuse_foreign(source: Path) -> None:
    """Raise :class:`CheckpointError` if a directory has no weights that are read, but another trainer's."""
    if (
        source.is_dir()
        and not has_weights(source)
        and (found := written_elsewhere(source)) is not None
    ):
        raise CheckpointError(
            f"{source} must be a Hugging Face directory with safetensors, and it holds {found}"
        )
