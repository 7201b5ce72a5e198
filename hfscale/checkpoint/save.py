"""Write a plain Hugging Face checkpoint, tensor by tensor.

Data flow: shapes and types of all tensors are known from the plan, so rank 0 writes each file's header first and then
streams. For one parameter after the other, every rank whose share no other rank sends (replica 0 of the data axes)
sends it to rank 0, which puts it in its place in one whole tensor and writes that to its file. No rank ever holds more
than one whole tensor. Files grow aside and are put into place all at once (:mod:`hfscale.files.replace`).
"""

from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from .. import guards
from .._host.transformers.saving import AsStored, write_configs
from ..files.directories import target_of
from ..files.writer import STALE, CheckpointWriter
from ..runtime import Runtime, runtime_of
from ..runtime.atomic_directory import atomic_directory
from ..runtime.full_tensors import full_tensors, tensors_to_save
from ..runtime.writing import all_or_none, everyone_arrives, is_writer, not_finite, saving, warn_of_not_finite

_WAIT = timedelta(minutes=2)


@saving()
def save_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    max_shard_size: str | int = "5GB",
    timeout: timedelta = _WAIT,
    check_replicas: bool = True,
) -> None:
    """Write ``model`` as an ordinary Hugging Face directory that loads with hfscale uninstalled.

    Call it on every rank. Weights that ``directory`` holds already are replaced at the very end, all at once;
    other files in it stay. Of a model with adapters, the adapter is written, in PEFT's format.

    Args:
        max_shard_size: the most bytes in one file, as for the host's ``save_pretrained``.
        timeout: how long to wait for ranks that have not called it.
        check_replicas: compare, bit by bit, what several ranks hold together.

    Raises:
        ConfigError: ``directory`` is empty, the root of the file system, or no path.
        CheckpointError: a rank did not arrive, ranks have drifted apart, or writing failed; ``directory`` is then as it
            was before.
    """
    runtime, target, call = runtime_of(model), target_of(directory), f"save_pretrained({str(directory)!r})"
    everyone_arrives(runtime.mesh, timeout, call)
    failing = all_or_none(runtime.mesh, f"{target} could not be written")
    with failing, runtime.around(lambda part: part.as_built()):
        if check_replicas:
            guards.check_replicas(runtime, call)
        if not any(part.save(runtime, target) for part in runtime.parts):
            _write(runtime, target, max_shard_size)


def _write(runtime: Runtime, target: Path, max_shard_size: str | int) -> None:
    entries = tensors_to_save(runtime)
    contents = {entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries}
    stored = AsStored(runtime.model, contents)
    with atomic_directory(target, runtime.mesh, stale=STALE) as staging:
        writer, wrong = None, ""
        if is_writer(runtime.mesh):
            writer = staging.attempt(CheckpointWriter, staging.path, stored.layout, max_shard_size)
        # All tensors are sent and received even after a failure, so that no rank waits for another.
        tensors = full_tensors(runtime, entries, attempt=staging.attempt)
        for entry, (name, tensor) in zip(entries, tensors, strict=True):
            if writer is not None:
                staging.attempt(_add, writer, stored, name, tensor)
                wrong = wrong or (staging.attempt(not_finite, {name: tensor}) if entry.planned else "") or ""
        if writer is not None:
            staging.attempt(write_configs, runtime.model, staging.path)
            staging.attempt(writer.finish)
    warn_of_not_finite(runtime.mesh, wrong, str(target))


def _add(writer: CheckpointWriter, stored: AsStored, name: str, tensor: Tensor) -> None:
    for stored_name, part in stored.made_of(name, tensor).items():
        writer.add(stored_name, part)
