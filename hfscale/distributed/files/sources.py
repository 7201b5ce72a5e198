"""Find model weights in a directory that another trainer has written, in a format that can be read in slices.

=========================  ==================================================  ==============================
format                     files                                               who writes it
=========================  ==================================================  ==============================
slices in safetensors      ``shard-00001-model-00001-of-00001.safetensors``    transformers' distributed saving
distributed checkpoint     ``.metadata``, ``__0_0.distcp``                     FSDP2 in plain loops, torchtitan
  in a subdirectory        ``pytorch_model_fsdp_0/``                           Accelerate, Trainer
state dict of FSDP         ``pytorch_model_fsdp.bin``                          Accelerate, Trainer
plain, without a config    ``model.safetensors``, ``pytorch_model.bin``        Accelerate's ``save_state``
=========================  ==================================================  ==============================

To add a format, add an entry to :data:`_FORMS`, or an :class:`AddedSource` in an extension. Before these formats,
:mod:`.weight_files` looks for transformers' own plain files (safetensors, ``pytorch_model.bin``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...extensions import all_provided, imported
from .reader import TensorOnDisk
from .weight_files import METADATA, SLICED, open_tensors, weight_files

_CONFIG = "config.json"
# names of weight files begin with these; names of a saved state's shards do not
_OF_MODELS = ("model", "pytorch_model")
_FULL = "pytorch_model_fsdp.bin"
_OF_MEGATRON = "common.pt"  # a file of Megatron's distributed checkpoints, which stack layers under other names


@dataclass(frozen=True)
class Source:
    """Describe where a model's weights are and in which format, and open them."""

    form: str  # the format, in words
    directory: Path  # the directory of the weight files
    reader: Callable[[Path], dict[str, TensorOnDisk]]  # opens the weights in the directory

    def describe(self) -> str:
        """Return the format of the weights, in words."""
        return self.form

    def open(self, model: Any = None) -> dict[str, TensorOnDisk]:
        """Return lazy tensors of the weights, by their names in ``model``, which is a full model. Their rows are in the
        order of the model's rows, which another program may have permuted.

        Without a ``model`` the tensors serve only to describe the weights.
        """
        tensors = self.reader(self.directory)
        renamed: dict[str, TensorOnDisk] | None = ask_added(
            "rename", tensors, None if model is None else model.config
        )
        return tensors if renamed is None else renamed

    def fitting(self, model: Any, tells: bool = False) -> "Source":
        """Return the source from which a full ``model`` on the meta device can be loaded: this one, or one that reads
        the full file on every rank if this one cannot read the model's weights in slices.

        With ``tells``, log a warning if every rank has to read the full file.
        """
        return self


@dataclass(frozen=True)
class FileWithConfig(Source, ABC):
    """Describe one file that contains the weights and also the config of a model (such as GGUF)."""

    file: Path

    @abstractmethod
    def build_model(self) -> Any:
        """Build the full model that the file describes, on the meta device."""

    @abstractmethod
    def write_small_files(self, model: Any, target: Path) -> None:
        """Write to ``target`` what the file contains besides weights: the config of the ``model``, and a tokenizer."""


class AddedSource:
    """Base class for extensions that read weights of another program; an extension registers an object under
    ``sources``.

    Each method returns ``None`` for an input that it does not recognize.
    """

    def find(self, path: Path) -> Source | None:
        """Return a description of the weights at ``path``, a directory or a file."""
        return None

    def find_optimizer(self, directory: Path) -> Any:
        """Return a description of the optimizer state in a directory: an
        :class:`~hfscale.checkpoint.foreign_optimizer.OptimizerSource`.
        """
        return None

    def locate(self, path: Any, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Find the weight file that the arguments ``path`` and ``kwargs`` of ``from_pretrained`` name. Return its
        directory, and the arguments to pass to transformers.
        """
        return None

    def recognize(self, source: Path) -> str | None:
        """Return a text that names the program whose weights are in ``source`` or one level below it, and the tool that
        converts them.
        """
        return None

    def rename(
        self, tensors: Mapping[str, TensorOnDisk], config: Any
    ) -> dict[str, TensorOnDisk] | None:
        """Return the tensors of another program under the names that transformers has for them, with their rows in
        transformers' order.

        ``config`` is the model's config, or ``None`` if the caller needs only the names.
        """
        return None


def ask_added(question: str, *given: Any) -> Any:
    """Call the method named ``question`` of each :class:`AddedSource`, with the arguments ``given``, and return the
    first result that is not ``None``; ``None`` if all are.
    """
    answers = (getattr(source, question)(*given) for source in all_provided("sources"))
    return next((answer for answer in answers if answer is not None), None)


# Of each format: its name in words, a pattern that matches a file that every directory in this format has, and module
# and name, in this package, of the function that opens the weights (:attr:`Source.reader`).
_FORMS = (
    ("slices of transformers' distributed saving", SLICED, "sliced_files:open_slices"),
    ("a distributed checkpoint of torch's (DCP)", METADATA, "dcp:open_checkpoint"),
    (
        "FSDP's shards (DCP) beside a state",
        "pytorch_model_fsdp_0/" + METADATA,
        "dcp:open_checkpoint",
    ),
    ("FSDP's full state dict", _FULL, "sources:_open_full"),
)


def find_source(path: Path) -> Source | None:
    """Find the weights that another trainer has written in a directory or a file.

    Return ``None`` if there are no weights, or if they are an ordinary checkpoint of transformers.
    """
    if (path / _OF_MEGATRON).exists():
        return None
    if plain := weight_files(path) if path.is_dir() else []:
        by_host = (path / _CONFIG).exists() or not plain[0].name.startswith(_OF_MODELS)
        return None if by_host else Source("weights alone", path, _open_plain)
    for words, pattern, reader in _FORMS:
        for found in sorted(path.glob(pattern))[:1]:
            return Source(words, found.parent, imported(f"{__package__}.{reader}"))
    added: Source | None = ask_added("find", path)
    return added


def _open_full(directory: Path) -> dict[str, TensorOnDisk]:
    return open_tensors([directory / _FULL])


def _open_plain(directory: Path) -> dict[str, TensorOnDisk]:
    return open_tensors(weight_files(directory))


def form_of(directory: Path) -> str | None:
    """Return the name of the format of the weights in a directory, such as ``"safetensors"``; ``None`` if it has no
    weights that hfscale reads.
    """
    if files := weight_files(directory):
        return "pytorch_model.bin" if files[0].suffix == ".bin" else "safetensors"
    source = find_source(directory)
    return None if source is None else source.form


def has_weights(directory: Path) -> bool:
    """Return whether a directory holds weights that hfscale reads: plain files, or files of another trainer."""
    return form_of(directory) is not None


def open_weights(directory: Path) -> dict[str, TensorOnDisk]:
    """Return lazy tensors of all weights in a directory, by their names in the model; an empty dict if it has no
    weights.
    """
    if files := weight_files(directory):
        return open_tensors(files)
    source = find_source(directory)
    return {} if source is None or isinstance(source, FileWithConfig) else source.open()


def written_elsewhere(source: Path) -> str | None:
    """Return a text that names the program whose weights are in ``source`` or one level below it, and the tool that
    converts them; ``None`` if no extension recognizes such weights.
    """
    recognized: str | None = ask_added("recognize", source)
    return recognized


def refuse_foreign(source: Path) -> None:
    """Raise :class:`CheckpointError` if a directory has weights of another program, and none that hfscale reads."""
    if (
        source.is_dir()
        and not has_weights(source)
        and (found := written_elsewhere(source)) is not None
    ):
        raise CheckpointError(
            f"{source} must be a Hugging Face directory with safetensors, but it holds {found}"
        )
