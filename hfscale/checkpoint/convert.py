"""Convert a saved state to a Hugging Face directory: one process, one tensor at a time, without a GPU."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .._compat.transformers.classes import empty_model
from .._compat.transformers.prediction import PREDICTION, attach_prediction, stored_names
from .._compat.transformers.saving import AsStored
from ..config.parallel import AXES, ParallelConfig
from ..distributed.files.complete import MARK
from ..distributed.files.writer import REPLACED, CheckpointWriter
from ..distributed.mesh import Mesh
from ..errors import CheckpointError
from ..train.runtime.writing import all_or_none, atomic_directory
from .carried import announced, carried_tensors, copy_files, copy_tensors, note_carried, stored_keys
from .save import write_parameter
from .state_directory import find_whole
from .state_format import INDEX, StateIndex, StateReader
from .stored_forms.encoding import QuantizedAgain, quantized_again
from .stored_forms.scheme import describe_form

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_CONFIGS = (".json", ".py", ".jinja")


def convert_state(
    source: Path,
    target: Path,
    *,
    max_shard_size: str | int = "5GB",
    trust_remote_code: bool = False,
    as_stored: bool = False,
) -> StateIndex:
    """Write the weights of a state as a Hugging Face directory, or, for a model with adapters, as PEFT's.

    The bytes are those that :func:`hfscale.save_pretrained` would have written. Memory holds one tensor at a time, and
    its conversion to the checkpoint's format.

    Args:
        source: directory of the state, or of several states.
        as_stored: quantize weights again in the form of the checkpoint that the model was loaded from.

    Returns:
        the index of the state.

    Raises:
        CheckpointError: there is no complete state, or it lacks weights (those in 4 or 8 bits are in the checkpoint
            that the model was loaded from).
    """
    alone = Mesh(ParallelConfig(), torch.device("cpu"), dict.fromkeys(AXES, 0))
    with all_or_none(alone, f"{source} could not be read"):
        directory = find_whole(source, alone, verify=True)
    index = StateIndex.read(directory)
    reader = StateReader(directory, index)
    missing = [name for name, key in index.stored.items() if key not in index.tensors]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} weights, {missing[0]} for one, which were held in 4 or 8 bits: they are "
            "in the checkpoint that the model was loaded from"
        )
    with atomic_directory(target, stale=REPLACED) as staging:
        if index.adapter:
            save_file(
                {name: reader.whole(key) for name, key in index.stored.items()},
                staging.path / _ADAPTER[1],
                metadata={"format": "pt"},
            )
            shutil.copyfile(directory / _ADAPTER[0], staging.path / _ADAPTER[0])
        else:
            _write_model(directory, reader, staging.path, max_shard_size, trust_remote_code, as_stored)
    return index


def _write_model(
    directory: Path, reader: StateReader, target: Path, size: str | int, trusted: bool, as_stored: bool
) -> None:
    tensors, stored = reader.index.tensors, reader.index.stored
    try:
        model = empty_model(directory, trusted)
    except (LookupError, ValueError, OSError) as error:
        raise CheckpointError(f"{directory}: the model cannot be built from its config: {error}") from error
    contents: dict[str, Tensor] = {
        name: torch.empty(tensors[key].shape, dtype=reader.dtype(key), device="meta") for name, key in stored.items()
    }
    if reader.index.carried is not None:
        source, names = reader.index.carried
        note_carried(model, Path(source), names)
    if any(name.startswith(f"{PREDICTION}.") for name in stored):
        attach_prediction(model)
        stored_names(model).read(model, stored_keys(model))
    converted = AsStored(model, contents)
    again = quantized_again(model) if as_stored else QuantizedAgain()
    carried = carried_tensors(model, as_stored)
    writer = CheckpointWriter(target, {**again.layout(converted.layout), **announced(carried)}, size)
    for name, key in stored.items():
        write_parameter(writer, converted, again, name, reader.whole(key))
    copy_tensors(carried, writer)
    writer.finish()
    for path in directory.iterdir():
        if path.suffix in _CONFIGS and path.name not in (INDEX, MARK):
            shutil.copyfile(path, target / path.name)
    copy_files(model, target, target)
    if again.form is not None:
        describe_form(target, again.form)
