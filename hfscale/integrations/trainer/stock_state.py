"""Read and write the optimizer's state in the format of ``transformers.Trainer`` in one process, in any layout.

Stock Trainer numbers parameters: first the parameters with weight decay, in the order of the full model, then the
parameters without. Each state tensor with the shape of its parameter is sharded, or gathered, like the parameter::

    optimizer.pt: {"state": {number: {"exp_avg": [full], "step": []}}, "param_groups": [{..., "params": [numbers]}]}
        <-- gathered on rank 0, one tensor after the other / --> each rank takes its shards

With FSDP2, stock Trainer writes ``optimizer_0/``, with names in place of numbers; each rank reads only its shards.
"""

from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._compat.transformers.classes import empty_copy
from ...checkpoint.foreign_optimizer import find_optimizer, names_here, restore_optimizer
from ...optim.factory import decays, owners_of
from ...train.runtime import Runtime, local_tensor
from ...train.runtime.full_tensors import SavedTensor, full_tensors, tensors_to_save
from ...train.runtime.parameter_names import stock_name

OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
_LARGEST = 16 << 30  # maximum bytes of a state that one process is assumed to be able to hold
_Kinds = dict[str, dict[str, torch.dtype | None]]
"""Name of a parameter -> name of a state tensor -> its dtype, if it has the parameter's shape; ``None`` for a scalar.
"""


def write(
    runtime: Runtime, directory: Path, optimizer: torch.optim.Optimizer, scheduler: Any
) -> None:
    """Write files from which stock Trainer resumes. If the state does not fit stock Trainer's format, or
    is too large, write files on which stock Trainer raises: without files, it would silently start with an empty state.
    Collective.
    """
    numbers = _stock_order(runtime, optimizer)
    kinds = _kinds(runtime, optimizer)
    written: dict[str, Any] = {"state": {}, "param_groups": [], "resume_with": "hfscale.Trainer"}
    if numbers is not None and kinds is not None and _size(runtime, kinds) <= _LARGEST:
        states = _gathered(runtime, optimizer, kinds)
        names = [name for group in numbers for name in group]
        options = [
            {key: v for key, v in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        number = count()
        written = {
            "state": {place: states[name] for place, name in enumerate(names) if name in states},
            "param_groups": [
                {**given, "params": [next(number) for _ in group]}
                for given, group in zip(options, numbers, strict=True)
            ],
        }
    if runtime.mesh.is_first:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(written, directory / OPTIMIZER)
        torch.save(scheduler.state_dict(), directory / SCHEDULER)


def read(
    runtime: Runtime, checkpoint: Path, optimizer: torch.optim.Optimizer, scheduler: Any
) -> bool:
    """Resume from a checkpoint of stock Trainer, on every rank; return whether the checkpoint has an optimizer's state.
    Raise for a state of other parameters, or of 8-bit blocks that the layout would split.
    """
    source = find_optimizer(checkpoint)
    if source is None:
        return False
    names = source.names or _stock_order(runtime, optimizer)
    restore_optimizer(runtime, source.path, source.state, names, optimizer)
    if source.schedule is not None:
        scheduler.load_state_dict(source.schedule)
    return True


def _stock_order(runtime: Runtime, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
    """Return the names of all ranks' parameters by parameter group, in the order of stock Trainer; ``None`` if the
    groups are not those of stock Trainer.
    """
    adapters = runtime.adapters
    whole = empty_copy(runtime.model) if adapters is None else adapters.whole.get_base_model()
    here = {planned.name for planned, p in runtime.parameters() if p.requires_grad}
    trains = set[str]().union(*runtime.mesh.all_gather_object(here))
    owners = owners_of(whole)
    groups = list[list[str]]([[], []])
    for name, parameter in whole.named_parameters():
        known = name if name in runtime.plan.by_name else stock_name(name)
        if known in trains:
            groups[0 if decays(known, owners[id(parameter)]) else 1].append(known)
    mine = names_here(runtime, optimizer)
    fits = len(mine) == 2 and all(
        set(own) <= set(group) for own, group in zip(mine, groups, strict=True)
    )
    return groups if all(runtime.mesh.all_gather_object(fits)) else None


def _kinds(runtime: Runtime, optimizer: torch.optim.Optimizer) -> _Kinds | None:
    """Return the kinds of optimizer states of all ranks' parameters, by name: a dtype for a state with the shape of its
    parameter, and ``None`` for a scalar. Return ``None`` if any state has another shape.
    """
    kinds: _Kinds = {}
    fits = True
    for planned, parameter in runtime.parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            share = local_tensor(value) if isinstance(value, Tensor) else None
            whole = (
                share is not None
                and share.ndim > 0
                and share.shape == local_tensor(parameter).shape
            )
            fits = fits and (whole or share is None or share.ndim == 0)
            kinds.setdefault(planned.name, {})[key] = (
                share.dtype if whole and share is not None else None
            )
    merged: _Kinds = {}
    for ok, other in runtime.mesh.all_gather_object((fits, kinds)):
        fits = fits and ok
        merged.update(other)
    return merged if fits else None


def _size(runtime: Runtime, kinds: _Kinds) -> int:
    return sum(
        torch.Size(runtime.plan.by_name[name].shape).numel() * dtype.itemsize
        for name, states in kinds.items()
        for dtype in states.values()
        if dtype is not None
    )


def _gathered(
    runtime: Runtime, optimizer: torch.optim.Optimizer, kinds: _Kinds
) -> dict[str, dict[str, Any]]:
    """Return full states by parameter, on rank 0; every rank must participate for all parameters."""
    held = {
        planned.name: optimizer.state.get(parameter, {})
        for planned, parameter in runtime.parameters()
    }
    gathered: dict[str, dict[str, Any]] = {}
    for of_rank in runtime.mesh.all_gather_object(_scalars(runtime, held, kinds)):
        for name, values in of_rank.items():
            gathered.setdefault(name, {}).update(values)
    entries = [
        entry for entry in tensors_to_save(runtime) if entry.planned and entry.planned.name in kinds
    ]
    for key in sorted({key for states in kinds.values() for key in states}):
        types = [(entry, kinds[entry.planned.name].get(key)) for entry in entries if entry.planned]
        typed = [replace(entry, dtype=dtype) for entry, dtype in types if dtype is not None]
        for entry, tensor in full_tensors(runtime, typed, partial(_share, held, key)):
            if runtime.mesh.is_first and entry.planned:
                gathered.setdefault(entry.planned.name, {})[key] = tensor.cpu().clone()
    return gathered


def _scalars(
    runtime: Runtime, held: dict[str, dict[str, Any]], kinds: _Kinds
) -> dict[str, dict[str, Any]]:
    """Return the scalars of the parameters' states on this rank."""
    # Optimizers do not update empty shards, whose counts of steps remain those that a resume has loaded.
    updated = [p.name for p, parameter in runtime.parameters() if local_tensor(parameter).numel()]
    return {
        name: {key: value for key, value in held[name].items() if kinds[name].get(key) is None}
        for name in updated
        if held[name]
    }


def _share(held: dict[str, Any], key: str, entry: SavedTensor) -> Tensor | None:
    value = held.get(entry.planned.name, {}).get(key) if entry.planned else None
    return None if value is None else local_tensor(value)
