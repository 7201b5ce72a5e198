"""Find the weights of a model in a directory that another trainer has written, in a form that is read by its slices.

=========================  ==================================================  ==============================
form                       files                                               who writes it
=========================  ==================================================  ==============================
slices in safetensors      ``shard-00001-model-00001-of-00001.safetensors``    transformers' distributed saving
distributed checkpoint     ``.metadata``, ``__0_0.distcp``                     FSDP2 in plain loops, torchtitan
  beside others            ``pytorch_model_fsdp_0/``                           Accelerate, Trainer
partitions of ZeRO         ``latest``, ``zero_pp_rank_0_mp_rank_00_...pt``     DeepSpeed, Trainer
state dict of FSDP         ``pytorch_model_fsdp.bin``                          Accelerate, Trainer
plain, without a config    ``model.safetensors``, ``pytorch_model.bin``        Accelerate's ``save_state``
GGUF                       ``model-Q4_K_M.gguf``                               llama.cpp
=========================  ==================================================  ==============================

A further form is an entry of :data:`_FORMS`. Plain files (safetensors, ``pytorch_model.bin``) are transformers' own,
and come first: :mod:`.weight_files`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dcp import METADATA, open_checkpoint
from .gguf_file import SUFFIX, GgufFile
from .gguf_names import as_transformers as gguf_as_transformers
from .reader import TensorOnDisk
from .sliced_files import open_slices
from .titan_names import as_transformers, is_torchtitans
from .torch_file import TorchFile
from .weight_files import SLICED, open_tensors, weight_files
from .zero import LATEST, OPTIMIZER_STATES, open_partitions

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
        config = None if model is None else model.config
        return as_transformers(tensors, config) if is_torchtitans(tensors) else tensors


@dataclass(frozen=True)
class GgufSource(Source):
    """Describe a GGUF file."""

    path: Path

    def describe(self) -> str:
        """Return what it is, in words; raise :class:`CheckpointError` for a damaged one."""
        return f"{self.form} ({GgufFile(self.path).describe()})"

    def open(self, model: Any = None) -> dict[str, TensorOnDisk]:
        """Return lazy tensors by their names in a full ``model``; without one, by the file's own."""
        if model is None:
            return self.reader(self.directory)
        return gguf_as_transformers(GgufFile(self.path), model)


def gguf_source(path: Path) -> GgufSource:
    """Return how the weights in a GGUF file are read."""
    return GgufSource("a GGUF file", path.parent, lambda _: GgufFile(path).slices(), path)


def gguf_in(directory: Path) -> list[Path]:
    """Return the GGUF files in a directory that has no other weights."""
    found = sorted(directory.glob(f"*{SUFFIX}")) if directory.is_dir() else []
    return [] if found and weight_files(directory) else found


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
    _Form("DeepSpeed's ZeRO partitions", LATEST, open_partitions),
    _Form("DeepSpeed's ZeRO partitions", OPTIMIZER_STATES, open_partitions),
    _Form("FSDP's full state dict", _FULL, lambda directory: TorchFile(directory / _FULL).slices()),
)


def find_source(directory: Path) -> Source | None:
    """Return how the weights in a directory, or in a GGUF file, are read where transformers does not read them by
    slices; ``None`` if it does, or has none.
    """
    if directory.suffix == SUFFIX and directory.is_file():
        return gguf_source(directory)
    if not directory.is_dir() or (directory / _OF_MEGATRON).exists():
        return None
    if plain := weight_files(directory):
        by_host = (directory / _CONFIG).exists() or not plain[0].name.startswith(_OF_MODELS)
        return None if by_host else Source("weights alone", directory, _open_plain)
    for form in _FORMS:
        for found in sorted(directory.glob(form.pattern))[:1]:
            return Source(form.words, found.parent, form.reader)
    files = gguf_in(directory)
    return gguf_source(files[0]) if len(files) == 1 else None


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
    return {} if source is None or isinstance(source, GgufSource) else source.open()
