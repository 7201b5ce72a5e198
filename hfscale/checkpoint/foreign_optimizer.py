"""Restore an optimizer's state for full parameters that another trainer wrote: each rank reads its shards.

Torch numbers parameters in the order of the groups; torch's distributed checkpoints name them. A state tensor with the
shape of its parameter is sharded like the parameter. Other state tensors are replicated, or sharded by the rules of
hfscale's own optimizers.
"""

import json
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.files.dcp import optimizer_of
from ..distributed.files.reader import ShareOnDisk, TensorOnDisk
from ..distributed.files.sources import ask_added
from ..distributed.files.weight_files import METADATA
from ..errors import CheckpointError
from ..plan import ParameterPlan
from ..train.runtime import Runtime, like_sharded, runtime_of
from ..train.runtime.writing import all_or_none

SHARDED = "optimizer_0"  # a torch distributed checkpoint, written under FSDP2 next to pytorch_model_fsdp_0
_WHOLE = ("optimizer.pt", "optimizer.bin")  # written by Trainer, by Accelerate
_SCHEDULES = ("scheduler.pt", "scheduler.bin")
_PROGRESS = "trainer_state.json"


@dataclass(frozen=True)
class OptimizerSource:
    """Hold an optimizer's state that another trainer wrote."""

    path: Path
    state: dict[str, Any]  # in the format of ``state_dict()``; tensors may be lazy
    named: bool  # whether the state names parameters; otherwise it numbers them in the order of the groups
    schedule: dict[str, Any] | None = None
    step: int | None = None  # the number of completed steps, if the state contains it

    @property
    def names(self) -> list[list[str]] | None:
        """Return the names of the parameters in each group; ``None`` if the optimizer's state does not name its
        parameters.
        """
        groups = self.state["param_groups"]
        return [list(group["params"]) for group in groups] if self.named else None


def find_optimizer(directory: Path) -> OptimizerSource | None:
    """Return the optimizer's state in another trainer's directory; ``None`` if the directory has no state that hfscale
    can read.
    """
    found = _found(directory)
    if found is None:
        return None
    step = _step_of(directory)
    path = next((directory / name for name in _SCHEDULES if (directory / name).exists()), None)
    return replace(
        found,
        schedule=found.schedule if path is None else read_state_dict(path),
        step=found.step if step is None else step,
    )


def _found(directory: Path) -> OptimizerSource | None:
    for path in (directory / SHARDED, directory):
        if (path / METADATA).exists() and (state := optimizer_of(path)) is not None:
            return OptimizerSource(path, state, named=True)
    for path in (directory / name for name in _WHOLE):
        if path.exists():
            return OptimizerSource(path, read_state_dict(path), named=False)
    added: OptimizerSource | None = ask_added("find_optimizer", directory)
    return added


def load_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: str | Path,
    scheduler: Any = None,
) -> int | None:
    """Load the state of an optimizer that another trainer wrote, in any layout; call it on every rank::

        model = hfscale.from_pretrained(DIRECTORY, config=BASE, parallel=parallel)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # with the same groups as before
        done = hfscale.load_optimizer(model, optimizer, DIRECTORY, scheduler=scheduler)

    It reads FSDP2's distributed checkpoints (plain loops, Accelerate, Trainer), DeepSpeed's ZeRO partitions, and
    ``optimizer.pt`` or ``optimizer.bin`` of one process or DDP. Each rank reads its shards. A state of
    :func:`hfscale.save_state` is loaded by :func:`hfscale.load_state` instead.

    Args:
        optimizer: an optimizer of the model's parameters, with the same groups in the same order as the other
            trainer's.
        scheduler: the schedule into which the other trainer's schedule is loaded, if the directory has one.

    Returns:
        the number of completed steps, if the directory contains it, otherwise ``None``.

    Raises:
        CheckpointError: the directory has no such state, or the state of other parameters; nothing was changed.
    """
    runtime = runtime_of(model)
    with all_or_none(runtime.mesh, f"{directory} could not be loaded"):
        found = find_optimizer(Path(directory))
        if found is None:
            raise CheckpointError(
                f"{directory} must have an optimizer's state (optimizer_0, optimizer.pt, optimizer.bin, .metadata, or "
                "DeepSpeed's partitions), but has none: continue training from the weights alone"
            )
        names = found.names or names_of_groups(runtime, optimizer)
        restore_optimizer(runtime, found.path, found.state, names, optimizer)
        if scheduler is not None and found.schedule is not None:
            scheduler.load_state_dict(found.schedule)
    return found.step


def read_state_dict(path: Path) -> Any:
    """Read a state of plain data and tensors; the tensors stay in the file until they are accessed."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=path.stat().st_size > 0)


def _step_of(directory: Path) -> int | None:
    path = directory / _PROGRESS
    return int(json.loads(path.read_bytes())["global_step"]) if path.exists() else None


def restore_optimizer(
    runtime: Runtime,
    path: Path,
    written: dict[str, Any],
    names: list[list[str]] | None,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Load an optimizer's state for full parameters into ``optimizer``; each rank takes its shards.

    Args:
        path: the path of the state, for errors.
        written: the state in the format of ``state_dict()``; tensors may be lazy.
        names: the parameters of each of the state's groups, in order; ``None`` if they are unknown.

    Raises:
        CheckpointError: the optimizer has other parameters or other groups; or the layout would split the blocks of
            8-bit states.
    """
    mine = names_here(runtime, optimizer)
    groups = written["param_groups"]
    number = _numbers(runtime, groups, names)
    fits = len(mine) == len(groups) and all(
        {number.get(name) for name in own} <= set(group["params"])
        for own, group in zip(mine, groups, strict=True)
    )
    if not all(runtime.mesh.all_gather_object(fits)):
        theirs = sum(len(group["params"]) for group in groups)
        raise CheckpointError(
            f"{path} holds the optimizer's state for {theirs} parameters in {len(groups)} groups, but this run's "
            f"optimizer has {sum(map(len, mine))} parameters in {len(mine)} groups: build the model and the optimizer "
            "as in the run that wrote it"
        )
    state: dict[Any, dict[str, Any]] = {}
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for name, parameter in zip(chain.from_iterable(mine), parameters, strict=True):
        plan = runtime.plan.by_name[name]
        place = number[name]
        stored = _flat(written["state"].get(place, {}))
        _refuse_blocks(path, stored, plan)
        state[place] = {
            key: _taken(key, value, plan, parameter, runtime.mesh.ranks, optimizer)
            for key, value in stored.items()
        }
    restored = [
        {**options, "params": [number[name] for name in own]}
        for own, options in zip(mine, groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": restored})


def _numbers(
    runtime: Runtime, groups: list[dict[str, Any]], names: list[list[str]] | None
) -> dict[str, Any]:
    """Map the names of parameters to their identifiers in an optimizer's state, which are numbers or names. ``groups``
    are the state's groups, and ``names`` the parameters' names in each group. Return an empty map if the groups in both
    have different sizes.
    """
    owner = {each.name: each.first_name for each in runtime.plan.parameters}
    if names is None or [len(group["params"]) for group in groups] != [len(each) for each in names]:
        return {}
    return {
        owner.get(name, name): place
        for group, own in zip(groups, names, strict=True)
        for name, place in zip(own, group["params"], strict=True)
    }


def names_here(runtime: Runtime, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of this rank's parameters in each group of an optimizer."""
    held = {id(parameter): planned.name for planned, parameter in runtime.parameters()}
    return [[held[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def names_of_groups(runtime: Runtime, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
    """Return the names of the parameters in each group of an optimizer, over all pipeline stages, in the order that the
    optimizer would have in one process. Return ``None`` if the stages do not determine this order. Collective.
    """
    every = runtime.mesh.all_gather_object(names_here(runtime, optimizer))
    place = {planned.name: number for number, planned in enumerate(runtime.plan.owned())}
    tied = {name for name in place if len(runtime.plan.holders(name)) > 1}
    groups = []
    for parts in zip(*every, strict=True):
        alone = [[name for name in part if name not in tied] for part in parts]
        in_order = all(part == sorted(part, key=place.__getitem__) for part in alone)
        if all(part == parts[0] for part in parts):
            groups.append(parts[0])
        elif in_order:
            groups.append(sorted(set().union(*parts), key=place.__getitem__))
        else:
            return None
    return groups


def _refuse_blocks(path: Path, state: dict[str, Any], planned: ParameterPlan) -> None:
    if "absmax1" in state and planned.cuts:
        raise CheckpointError(
            f"{path} has 8-bit optimizer states, whose blocks span full tensors, so this layout cannot shard them: "
            "resume in one process, or from a checkpoint of hfscale.Trainer"
        )


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's optimizer state with the entries of nested dictionaries, as bitsandbytes writes them, moved
    to the top level.
    """
    nested = [value for value in state.values() if isinstance(value, dict)]
    plain = {key: value for key, value in state.items() if not isinstance(value, dict)}
    return {
        **plain,
        **{key: value for each in nested for key, value in each.items()},
    }


def _taken(
    key: str,
    value: Any,
    planned: ParameterPlan,
    parameter: Tensor,
    ranks: dict[str, int],
    optimizer: Any,
) -> Any:
    """Return this rank's shard of a full state tensor, sharded like its parameter or by the rules of hfscale's
    optimizers.
    """
    plain = bool(getattr(optimizer, "keeps_plain_state", False))
    if isinstance(value, TensorOnDisk):
        if value.shape != planned.shape:
            return value[...]
        value = ShareOnDisk(value, planned.cuts, ranks)[...]
        return value if plain else like_sharded(value, parameter)
    if not isinstance(value, Tensor):
        return value
    if (
        value.ndim == 0
    ):  # copy a step count: the optimizer increments it in place, and several parameters may share the tensor
        return value.clone()
    if tuple(value.shape) == tuple(planned.shape):
        share = planned.take(value, ranks).clone()
        return share if plain else like_sharded(share, parameter)
    state_layout = optimizer.state_layout(planned, key, tuple(value.shape)) if plain else None
    if (
        state_layout is not None
        and not state_layout.own
        and tuple(state_layout.shape) == tuple(value.shape)
    ):
        for cut in () if state_layout.block else state_layout.cuts:
            value = cut.take(value, ranks.get(cut.axis, 0))
        return value.clone()
    return value
