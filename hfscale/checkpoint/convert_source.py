"""Convert another library's weights to a Hugging Face directory, one tensor at a time, without a GPU."""

import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import GENERATION_CONFIG_NAME

from .._compat.transformers.classes import class_name, empty_model
from .._compat.transformers.stored import AsStored
from ..distributed.files.reader import TensorOnDisk
from ..distributed.files.sources import FileWithConfig, Source
from ..distributed.files.writer import REPLACED, CheckpointWriter
from ..errors import CheckpointError
from ..train.runtime.writing import atomic_directory
from .copied import copy_files
from .coverage import note_carried
from .save import write_parameter
from .written_form import PlainForm

_CONFIG = "config.json"


def convert_source(
    source: Source,
    target: Path,
    config: Path | None = None,
    *,
    max_shard_size: str | int = "5GB",
    trust_remote_code: bool = False,
) -> int:
    """Write the weights of a source as a Hugging Face directory; return the number of tensors written.

    Args:
        config: the directory with the model's ``config.json``, from which small files are copied. By default, this is
            the source directory, or the config that a single file (GGUF) contains.

    Raises:
        CheckpointError: the weights do not belong to the config's class, or some shards are missing.
    """
    own = source if config is None and isinstance(source, FileWithConfig) else None
    home = _home(source, config) if own is None else own.file
    try:
        model = own.build_model() if own is not None else empty_model(home, trust_remote_code)
    except (LookupError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{home}: the model cannot be built from its config: {error}: correct this config, or give another one "
            "with --config BASE"
        ) from error
    source = source.fitting(model)
    stored = source.open(model)
    _check(model, source, stored)
    contents = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stored.items()
    }
    converted = AsStored(model, contents)
    plain = PlainForm()
    count = sum(prod(tensor.shape) for tensor in stored.values())
    with atomic_directory(target, stale=REPLACED) as staging:
        writer = CheckpointWriter(staging.path, converted.layout, max_shard_size, count)
        for name, tensor in stored.items():
            write_parameter(writer, converted, plain, name, tensor[...])
        writer.finish()
        if own is not None:
            own.write_small_files(model, staging.path)
        for name in (_CONFIG, GENERATION_CONFIG_NAME):
            if (home / name).exists():
                shutil.copyfile(home / name, staging.path / name)
        note_carried(model, home, ())
        copy_files(model, staging.path, target)
    return len(converted.layout)


def describe_source(source: Source, given: Path, verify: bool = True) -> tuple[list[str], bool]:
    """Return lines of text about another library's weights in a directory, and whether all of them can be read;
    ``verify`` reads every value.
    """
    try:
        stored = source.open()
        for tensor in stored.values() if verify else ():
            tensor[...]
        _compare_with_config(source)
    except CheckpointError as error:
        return [f"{given}: {source.form}", f"  not whole: {error}"], False
    size = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in stored.values())
    lines = [f"{given}: {source.describe()}, {len(stored)} tensors, {size:,} bytes"]
    state = given / TRAINER_STATE_NAME
    if state.exists():
        step = json.loads(state.read_bytes()).get("global_step")
        lines.append(f"  of a Trainer, step {step}: hfscale.Trainer resumes from it")
    has_config = (given / _CONFIG).exists() or isinstance(source, FileWithConfig)
    asks = "" if has_config else ", config=BASE"
    option = "" if has_config else " --config BASE"
    lines.append(f"  weights: hfscale.from_pretrained({str(given)!r}{asks}), in any layout")
    lines.append(f"  as safetensors: hfscale convert {given} OUT{option}")
    return lines, True


def _compare_with_config(source: Source) -> None:
    """Raise :class:`CheckpointError` if tensors of a source have other shapes than the config in the same directory
    requires. Without this check, one of several ranks' shards would look like a full tensor.
    """
    if isinstance(source, FileWithConfig) or not (source.directory / _CONFIG).exists():
        return
    try:
        model = empty_model(source.directory, trusted=False)
    except (
        LookupError,
        ValueError,
        OSError,
        ImportError,
    ):  # the model needs custom code, or a newer class
        return
    stored = source.open(model)
    for name, tensor in model.state_dict().items():
        if name in stored and stored[name].shape != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} must have the shape {tuple(tensor.shape)} according to {source.directory / _CONFIG}, got "
                f"{stored[name].shape}: copy the files of all ranks that wrote the checkpoint"
            )


def _home(source: Source, config: Path | None) -> Path:
    """Return the directory with the model's config."""
    places = [config] if config is not None else [source.directory, source.directory.parent]
    found = next((place for place in places if (place / _CONFIG).exists()), None)
    if found is None:
        raise CheckpointError(
            f"converting {source.directory} needs the model's config.json, but {places[0]} has none: give the "
            "directory that has it with --config BASE"
        )
    return found


def _check(model: Any, source: Source, stored: Mapping[str, TensorOnDisk]) -> None:
    """Raise :class:`CheckpointError` unless the tensors have exactly the names and shapes of the model's parameters."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    both = [name for name in expected if name in stored]
    problems = {
        "lacks": [name for name in expected if name not in stored and name not in tied],
        "also has": [name for name in stored if name not in expected],
        "has another shape of": [name for name in both if stored[name].shape != expected[name]],
    }
    for what, names in problems.items():
        if names:
            raise CheckpointError(
                f"{source.directory} must hold exactly the weights of {class_name(model)}, but {what} {names[0]} and "
                f"{len(names) - 1} more: give the config that the weights were trained with (--config BASE)"
            )
