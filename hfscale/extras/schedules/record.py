"""Record the steps of a real run as a trace, to view in Perfetto or next to the planned schedule."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..._compat.torch_device import device_module, is_accelerator
from ...config.schedules import schedule_of
from ...distributed.mesh import Mesh
from ...errors import ConfigError, check_path
from ...parallel.pipeline.recorder import Record, Recorder
from ...parallel.pipeline.run import Pipeline
from ...parallel.pipeline.timeline import Action, Span, Timeline
from ...train.runtime import runtime_of
from .chrome_trace import merge_records, write_trace


@contextmanager
def record_schedule(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record each pipeline rank's actions with their times inside the ``with`` block; rank 0 writes them to ``path``.

    Call it on every rank, around as many steps as you want to record (the first steps are slower than later ones)::

        with hfscale.record_schedule(model, "steps.json"):
            for batch in itertools.islice(batches, 3):
                hfscale.train_step(model, batch)
                optimizer.step()
                optimizer.zero_grad()

    The file opens in Perfetto (ui.perfetto.dev), and ``hfscale schedule --trace steps.json`` draws its last full step
    below the planned one. If there are several pipelines (tensor-parallel or data-parallel ranks), the first one is
    written. Optimizer steps over the model's parameters are recorded as updates. On a GPU, the CPU synchronizes after
    every action, so that an action's time is that of its kernels. Outside the block nothing is recorded, at no cost.

    Raises:
        ConfigError: on every rank: the model has no pipeline stages or is already being recorded, or the folder of
            ``path`` does not exist.
    """
    runtime = runtime_of(model)
    check_path("path", path)
    target = Path(path)
    pipeline = runtime.executor
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            f"{runtime.mesh.layout.describe()} has no pipeline stages to record: use a layout with pp_size=2 or more"
        )
    workers = pipeline.workers
    if any(worker.recorder is not None for worker in workers):
        raise ConfigError(
            "this model is being recorded already: end the first record_schedule block before the next one begins"
        )
    # Check the folder now, on rank 0, because a failed write at the end would leave the other ranks waiting.
    missing = [not target.absolute().parent.is_dir()]
    dist.broadcast_object_list(missing, src=0, group=runtime.mesh.control)
    if missing[0]:
        raise ConfigError(
            f"{target} cannot be written: {target.absolute().parent} is not a folder: make it first"
        )
    device = runtime.mesh.device
    # Synchronize the compute stream, not the device, so that sends and receives in flight continue.
    recorder = Recorder(
        device_module(device).current_stream(device).synchronize if is_accelerator(device) else None
    )
    dist.barrier(group=runtime.mesh.control)
    recorder.start()
    for worker in workers:
        worker.recorder = recorder
    try:
        with _updates_noted(recorder, workers[0].place.index, runtime.model.parameters()):
            yield
    finally:
        for worker in workers:
            worker.recorder = None
    records = _gather(recorder.record, runtime.mesh)
    if records:
        layout = runtime.mesh.layout
        count = 0
        # If steps overlap, the microbatches of one step cannot be counted in the records.
        if not layout.flushes:
            accumulates = schedule_of(layout.pipeline_schedule).microbatches_per_rank
            count = int(layout.num_microbatches or (0 if accumulates else 1))
        whole = merge_records(records, str(layout.pipeline_schedule), count)
        steps = split_steps(whole)
        write_trace(
            target,
            *steps,
            labels=[f"{whole.name}, step {number}" for number in range(1, len(steps) + 1)],
        )


def split_steps(whole: Timeline) -> list[Timeline]:
    """Split a run into steps; a step begins at an action that repeats. Overlapping (asynchronous) steps stay one."""
    ranks = [_parts(spans) for spans in whole.ranks]
    return [
        replace(whole, ranks=tuple(parts[step] for parts in ranks))
        for step in range(min(map(len, ranks)))
    ]


def _parts(spans: Iterable[Span]) -> list[tuple[Span, ...]]:
    parts: list[list[Span]] = []
    seen: set[Action] = set()
    for span in spans:
        if not parts or span.action in seen:
            parts.append([])
            seen = set()
        parts[-1].append(span)
        seen.add(span.action)
    return [tuple(part) for part in parts]


def _gather(record: Record, mesh: Mesh) -> list[Record]:
    """Gather, on rank 0, the records of the ranks of its pipeline, in order; other ranks get an empty list."""
    first = not any(rank for axis, rank in mesh.ranks.items() if axis != "pp")
    records: list[Any] | None = [None] * mesh.layout.total_size if dist.get_rank() == 0 else None
    dist.gather_object(
        (mesh.pp_rank, record) if first else None,
        records,
        dst=0,
        group=mesh.control,
    )
    return [
        record
        for _, record in sorted(
            filter(None, records or ()),
            key=lambda sent: sent[0],
        )
    ]


@contextmanager
def _updates_noted(
    recorder: Recorder, stage: int, parameters: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Record optimizer steps over any of ``parameters`` as updates of ``stage``, after the first recorded action."""
    own = {id(parameter) for parameter in parameters}
    begun: list[int] = []
    count = 0

    def is_ours(optimizer: torch.optim.Optimizer) -> bool:
        return any(
            id(parameter) in own
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if recorder.record.events and is_ours(optimizer):
            begun[:] = [recorder.now()]

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal count
        if begun and is_ours(optimizer):
            recorder.note(Action(stage, "update", count), begun.pop())
            count += 1

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
