"""Agree on a state's index: every rank computes the same one from all ranks' contributions."""

from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from ..plan.state_tensor import StateTensor
from ..train.runtime.full_tensors import in_order
from .state_index import StateIndex
from .state_take import TakenState


@dataclass
class _Told:
    """One rank's contribution to the index of a state."""

    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[list[str]] | None = None
    others: dict[str, str] = field(default_factory=dict)
    entries: list[tuple[Any, ...]] = field(default_factory=list)
    stored: dict[str, str] = field(default_factory=dict)


def agreed_index(taken: TakenState) -> StateIndex:
    """Return the index, the same on every rank; collective. The first rank of each stage contributes its tensors."""
    mesh, plan, contents = taken.mesh, taken.runtime.plan, taken.contents
    told = _Told(others=taken.digests, entries=taken.entries, stored=taken.stored)
    if mesh.speaks_for_stage:
        told.tensors = {key: tensor.told() for key, tensor in contents.tensors.items()}
        told.numbers, told.groups = contents.numbers, contents.groups
    every: list[_Told] = mesh.all_gather_object(told)
    index = StateIndex.of(mesh.layout, plan)
    index.step = taken.step
    index.versions = {"hfscale": metadata.version("hfscale"), "torch": str(torch.__version__)}
    index.optimizer = contents.optimizer
    digests = taken.digests.items()
    index.others = {name: all(each.others.get(name) == digest for each in every) for name, digest in digests}
    for each in every:
        _merge(index, each)
    # A rank may have optimizer state that the first rank of its stage lacks.
    unheard = {key: contents.tensors[key].told() for key in contents.held if key not in index.tensors}
    for tensors in mesh.all_gather_object(unheard):
        _merge(index, _Told(tensors))
    _add_stored_names(index, taken, every)
    return index


def _add_stored_names(index: StateIndex, taken: TakenState, every: list[_Told]) -> None:
    """Add the names that a converter to a checkpoint needs."""
    plan = taken.runtime.plan
    if names := {key: name for each in every for key, name in each.stored.items()}:
        owned = {planned.name: planned.tied_to or planned.name for planned in plan.parameters}
        index.adapter, index.stored = True, {key: f"weights/{owned[name]}" for key, name in names.items()}
        return
    entries = in_order(taken.runtime, [each.entries for each in (every if plan.stages is not None else every[:1])])
    index.stored = {e.name: f"weights/{e.planned.name}" if e.planned else f"buffers/{e.name}" for e in entries}


def _merge(index: StateIndex, told: _Told) -> None:
    """Add a contribution; existing entries stay, so the first stage's counts if several have a tensor."""
    for key, tensor in told.tensors.items():
        index.tensors.setdefault(key, StateTensor.hear(tensor))
    for name, numbers in told.numbers.items():
        index.numbers.setdefault(name, numbers)
    if told.groups is not None:
        merged = index.groups if index.groups is not None else [[] for _ in told.groups]
        pairs = zip(merged, told.groups, strict=True)
        index.groups = [[*old, *(name for name in new if name not in set(old))] for old, new in pairs]
