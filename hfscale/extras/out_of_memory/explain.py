"""Explain that memory ran out: the bytes held, by kind, next to the planned bytes, and settings that need less.

:mod:`hfscale.distributed.failures` calls this when the process ends, so nothing is recorded during training. Models and
optimizers are found among the live objects of Python, and the batch among the variables of the error's traceback.
"""

import gc
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch_device import memory_in_use, write_memory_snapshot
from ...cost.model.memory_model import MemoryEstimate
from ...cost.tools.memory_report import held_bytes, memory_estimate
from ...errors import HFScaleError
from ...plan.columns import aligned
from ...plan.table import human
from ...train.runtime import Runtime

_RECOMPUTE = {"gradient_checkpointing": True}
_HALF = {"tokens": 0.5}
_REST = "activations and others"
_LEVERS: dict[str, dict[str, Any]] = {
    "gradient checkpointing": _RECOMPUTE,
    "microbatches of half the tokens": _HALF,
    "both": {**_RECOMPUTE, **_HALF},
    "both, and an optimizer in 8 bits (adamw_8bit)": {
        **_RECOMPUTE,
        **_HALF,
        "optimizer": "adamw_8bit",
    },
}


def explain(error: BaseException) -> str:
    """Return lines for the log about every live model that hfscale parallelized; empty if there is none."""
    alive = [
        each for each in gc.get_objects() if issubclass(type(each), Runtime | torch.optim.Optimizer)
    ]
    stepping = [each for each in alive if isinstance(each, torch.optim.Optimizer)]
    optimizers = {
        id(p): each for each in stepping for group in each.param_groups for p in group["params"]
    }
    lines = []
    for runtime in (each for each in alive if isinstance(each, Runtime)):
        own = [
            optimizers[id(each)] for each in runtime.model.parameters() if id(each) in optimizers
        ]
        lines += _of_model(runtime, own[0] if own else None, _batch(error))
    if lines and (path := write_memory_snapshot()):
        lines.append(f"snapshot of the device's memory, for pytorch.org/memory_viz: {path}")
    return "\n".join(lines)


def _of_model(runtime: Runtime, optimizer: Any, batch: Tensor | None) -> list[str]:
    (used, limit), held = memory_in_use(), held_bytes(runtime.model, optimizer)
    held[_REST] = max(0, used - sum(held.values()))
    planned = None if batch is None else _planned(runtime, optimizer, batch)
    told = Counter[str]()
    for kind, size in planned.kinds.items() if planned is not None else ():
        told[kind if kind in held else _REST] += size
    rows = [
        (human(size), human(told[kind]), kind) for kind, size in held.items() if size or told[kind]
    ]
    head = f"memory of {runtime.mesh.device} on rank {runtime.mesh.rank}: {human(used)} of {human(limit)}"
    lines = [
        head,
        *aligned([("held", "planned", ""), *rows], left=(2,)),
    ]
    if batch is None or planned is None:
        return lines
    lines.append(
        f"a microbatch of {batch.numel():,} tokens would need, instead of {human(planned.total)}"
    )
    for words, changed in _LEVERS.items():
        estimate = _planned(runtime, optimizer, batch, **changed)
        if estimate is not None and estimate.total < planned.total:
            lines.append(
                f"  {words}: {human(estimate.total)}, {'fits' if estimate.likely <= limit else 'does not fit'}"
            )
    ranks = runtime.mesh.layout.total_size
    name = runtime.model.config.name_or_path or "MODEL"
    return [
        *lines,
        f"  another layout: hfscale search {name} --gpus {ranks} --tokens-per-step {batch.numel() * ranks}",
    ]


def _planned(
    runtime: Runtime, stepping: Any, batch: Tensor, **changed: Any
) -> MemoryEstimate | None:
    """Estimate the memory of a step over microbatches like ``batch``; ``None`` if no estimate can be made.

    ``changed``: options of the estimate that differ from those of the run. Among them, ``tokens`` is a fraction of the
    batch's tokens.
    """
    layout = runtime.mesh.layout
    tokens = max(1, int(layout.of_full_sequences(batch.numel()) * changed.pop("tokens", 1)))
    given = {"optimizer": getattr(stepping, "name", "adamw_torch_fused"), "tokens": tokens}
    length = min(tokens, int(layout.of_full_sequences(batch.shape[-1])))
    try:
        return memory_estimate(runtime.model, sequence_length=length, **{**given, **changed})
    except HFScaleError:  # no estimate exists for this optimizer
        return None


def _batch(error: BaseException) -> Tensor | None:
    """Return the token ids of a microbatch in the innermost frame of a traceback that has one."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            for batch in value if isinstance(value, list) else [value]:
                if isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), Tensor):
                    return ids
    return None
