"""Write a plain Hugging Face checkpoint, tensor by tensor.

Data flow: shapes and dtypes of all tensors are known from the plan, so rank 0 writes each file's header first and then
streams. For one parameter after another, one replica of every shard is sent to rank 0, which assembles the full tensor
and writes it to a file. No rank ever holds more than one full tensor. Files are written to a temporary directory and
moved into place all at once (:mod:`hfscale.distributed.files.replace`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from .._compat.transformers.stored import AsStored, write_configs
from ..distributed.files.directories import target_of
from ..distributed.files.reader import TensorOnDisk
from ..distributed.files.writer import STALE, CheckpointWriter
from ..errors import ConfigError
from ..features.adapters import by_peft
from ..features.adapters.several import directories_of
from ..features.adapters.storage import AdapterFiles, save_adapter
from ..features.quantization.part import refuse_quantized
from ..train.around import refuse_without_around
from ..train.guards import replicas
from ..train.guards.part import as_built
from ..train.runtime import Runtime, runtime_of, writing
from ..train.runtime.full_tensors import full_tensors, tensors_to_save
from .copied import carried_tensors, copy_files, copy_tensors
from .stored_forms.scheme import describe_form
from .written_form import PlainForm, written_form


@writing.saving()
def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    max_shard_size: str | int = "5GB",
    timeout: timedelta = timedelta(minutes=2),
    check_replicas: bool = True,
    quantization: str | None = None,
) -> None:
    """Write ``model`` as an ordinary Hugging Face directory that loads with hfscale uninstalled.

    Call it on every rank. Earlier weights in ``directory`` are replaced at the very end, all at once; other files in
    the directory stay. Tensors that the model's class does not load, and the files of a tokenizer or processor, are
    copied from the checkpoint that the model was loaded from. For a model with adapters, only the adapters are written,
    in PEFT's format: the adapter "default" into ``directory``, and each further adapter into a subdirectory of its
    name, like PEFT.

    Args:
        max_shard_size: the maximum size of one file, as for transformers' ``save_pretrained``.
        timeout: how long to wait for ranks that have not made the call yet.
        check_replicas: compare replicas of parameters bit by bit first.
        quantization: with ``"as_stored"``, weights that are quantized in the model's source checkpoint are quantized
            again in the same quantization format. The source checkpoint is read again, and blocks that have not
            changed keep their bytes.

    Raises:
        ConfigError: ``directory`` is empty, the root of the file system, or not a path; or ``quantization`` has another
            value, or the model was not loaded from a quantized checkpoint.
        CheckpointError: a rank did not make the call, replicas differ, or writing failed; ``directory`` is then
            unchanged.
    """
    runtime = runtime_of(model)
    target = target_of(directory)
    call = f"save_pretrained({str(directory)!r})"
    if quantization is None and by_peft.save(runtime, model, target):
        return
    refuse_without_around(runtime, model, call)
    with _together(runtime, target, call, timeout, check_replicas):
        if (adapters := runtime.adapters) is not None:
            if quantization is not None:
                raise ConfigError(
                    f"quantization={quantization!r} writes full weights, but the model has adapters, which are saved "
                    "without the base: merge them first (hfscale.merge_and_unload), or leave quantization out"
                )
            for name, directory in directories_of(adapters.names, target).items():
                save_adapter(runtime, adapters.whole, name, directory)
        else:
            refuse_quantized(runtime.plan.quantized, target)
            _write(runtime, target, max_shard_size, written_form(quantization, runtime.model))


@writing.saving()
def save_adapter_files(
    runtime: Runtime,
    name: str,
    directory: str | Path,
    files: AdapterFiles,
    *,
    call: str,
    timeout: timedelta = timedelta(minutes=2),
) -> None:
    """Write only the adapter ``name``. This implements the ``save_pretrained`` of PEFT's model around a sharded model;
    every rank must call it. ``call`` is the name of the call in error messages. Raise :class:`CheckpointError`, with
    ``directory`` unchanged, if a rank did not make the call or writing failed.
    """
    adapters = runtime.adapters
    if adapters is None:
        raise ConfigError(
            f"{call} writes an adapter, but the model's adapter was merged or unloaded: use hfscale.save_pretrained"
        )
    target = target_of(directory)
    with _together(runtime, target, call, timeout, check_replicas=True):
        save_adapter(runtime, adapters.whole, name, target, files)


@contextmanager
def _together(
    runtime: Runtime, target: Path, call: str, timeout: timedelta, check_replicas: bool
) -> Iterator[None]:
    """Wait for every rank to make the ``call``; if one rank fails inside the ``with`` block, let all ranks fail."""
    writing.everyone_arrives(runtime.mesh, timeout, call)
    failing = writing.all_or_none(runtime.mesh, f"{target} could not be written")
    with failing, as_built(runtime):
        if check_replicas:
            replicas.check_replicas(runtime, call)
        yield


def _write(runtime: Runtime, target: Path, max_shard_size: str | int, again: PlainForm) -> None:
    entries = tensors_to_save(runtime)
    contents = {
        entry.name: torch.empty(
            entry.shape,
            dtype=entry.dtype,
            device="meta",
        )
        for entry in entries
    }
    stored = AsStored(runtime.model, contents)
    layout = again.layout(stored.layout)
    with writing.atomic_directory(target, runtime.mesh, stale=STALE) as staging:
        writer = None
        wrong = ""
        carried = dict[str, TensorOnDisk]()
        if runtime.mesh.is_first:
            carried = staging.attempt(carried_tensors, runtime.model, again) or carried
            layout = {**layout, **carried}
            size = runtime.plan.parameter_count
            writer = staging.attempt(CheckpointWriter, staging.path, layout, max_shard_size, size)
        # All tensors are sent and received even after a failure, so that no rank waits for another.
        tensors = full_tensors(runtime, entries, attempt=staging.attempt)
        for entry, tensor in tensors:
            if writer is not None:
                staging.attempt(write_parameter, writer, stored, again, entry.name, tensor)
                if entry.planned:
                    wrong = wrong or staging.attempt(writing.not_finite, {entry.name: tensor}) or ""
        if writer is not None:
            staging.attempt(copy_tensors, carried, writer)
            staging.attempt(write_configs, runtime.model, staging.path)
            staging.attempt(copy_files, runtime.model, staging.path, target)
            if again.form is not None:
                staging.attempt(describe_form, staging.path, again.form)
            staging.attempt(writer.finish)
    writing.warn_of_not_finite(runtime.mesh, wrong, str(target))


def write_parameter(
    writer: CheckpointWriter, stored: AsStored, again: PlainForm, name: str, tensor: Tensor
) -> None:
    """Write the stored tensors that are made from one parameter, quantized again if its checkpoint was quantized. A
    stored tensor that is made from several parameters is written when the last of them is passed.
    """
    for key, plain in stored.made_of(name, tensor).items():
        for stored_name, part in again.made_of(key, plain).items():
            writer.add(stored_name, part)
