"""Restore an optimizer's state that another trainer wrote of all parameters: each rank takes its shards of it.

Torch numbers parameters in the order of the groups; torch's distributed checkpoints name them. A state with the shape
of its parameter is cut like it; others belong to a whole parameter, or are cut as hfscale's own optimizers say.
"""

import json
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.files.dcp import METADATA, optimizer_of
from ..distributed.files.reader import ShareOnDisk, TensorOnDisk
from ..distributed.files.sources import ask_added
from ..errors import CheckpointError
from ..plan import ParameterPlan
from ..train.runtime import Runtime, like_sharded, runtime_of
from ..train.runtime.writing import all_or_none

SHARDED = (
    "optimizer_0"  # of FSDP2, a distributed checkpoint of torch's, beside pytorch_model_fsdp_0
)
_WHOLE = ("optimizer.pt", "optimizer.bin")  # of Trainer, of Accelerate
_SCHEDULES = ("scheduler.pt", "scheduler.bin")
_PROGRESS = "trainer_state.json"


@dataclass(frozen=True)
class OptimizerSource:
    """Hold an optimizer's state that another trainer wrote."""

    path: Path
    state: dict[str, Any]  # as ``state_dict()`` has it; tensors may be lazy
    named: bool  # whether it names parameters; else it numbers them in the order of the groups
    schedule: dict[str, Any] | None = None
    step: int | None = None  # how many steps were done, if it says so

    @property
    def names(self) -> list[list[str]] | None:
        """Return the parameters of each group, if the state names them."""
        groups = self.state["param_groups"]
        return [list(group["params"]) for group in groups] if self.named else None


def find_optimizer(directory: Path) -> OptimizerSource | None:
    """Return the optimizer's state in another trainer's directory; ``None`` if it has none that is read."""
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
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # in groups as then
        done = hfscale.load_optimizer(model, optimizer, DIRECTORY, scheduler=scheduler)

    Read are FSDP2's distributed checkpoints (plain loops, Accelerate, Trainer), DeepSpeed's ZeRO partitions, and
    ``optimizer.pt`` or ``optimizer.bin`` of one process or DDP. Each rank reads its slices. For what
    :func:`hfscale.save_state` wrote there is :func:`hfscale.load_state`.

    Args:
        optimizer: made of the model's parameters, in the same groups in the same order, as the other trainer's was.
        scheduler: gets the state of that trainer's schedule, if the directory has one.

    Returns:
        the number of steps done, if the directory says so.

    Raises:
        CheckpointError: the directory has no such state, or that of other parameters; nothing is changed then.
    """
    runtime = runtime_of(model)
    with all_or_none(runtime.mesh, f"{directory} could not be loaded"):
        found = find_optimizer(Path(directory))
        if found is None:
            raise CheckpointError(
                f"{directory} must have an optimizer's state (optimizer_0, optimizer.pt, optimizer.bin, .metadata, or "
                "DeepSpeed's partitions), and has none: train on from the weights alone"
            )
        names = found.names or names_of_groups(runtime, optimizer)
        restore_optimizer(runtime, found.path, found.state, names, optimizer)
        if scheduler is not None and found.schedule is not None:
            scheduler.load_state_dict(found.schedule)
    return found.step


def read_state_dict(path: Path) -> Any:
    """Read a state of plain data and tensors, which stay in the file until they are read."""
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
    """Load the state of an optimizer over the whole model into ``optimizer``, of which each rank takes its shards.

    Args:
        path: where it is from, for errors.
        written: as ``state_dict()`` has it; tensors may be lazy.
        names: the parameters of each of its groups, in order; ``None`` if nobody knows.

    Raises:
        CheckpointError: other parameters train now, or in other groups; or blocks of 8 bits would be cut.
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
            f"{path} is the state of {theirs} parameters in {len(groups)} groups, and this run trains "
            f"{sum(map(len, mine))} here in {len(mine)}: build model and optimizer as they were built then"
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
    """Return what a state calls each parameter, a number or a name; nothing where its groups have other numbers."""
    owner = {each.name: each.tied_to or each.name for each in runtime.plan.parameters}
    if names is None or [len(group["params"]) for group in groups] != [len(each) for each in names]:
        return {}
    return {
        owner.get(name, name): place
        for group, own in zip(groups, names, strict=True)
        for name, place in zip(own, group["params"], strict=True)
    }


def names_here(runtime: Runtime, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return this rank's parameters in each group."""
    held = {id(parameter): planned.name for planned, parameter in runtime.parameters()}
    return [[held[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def names_of_groups(runtime: Runtime, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
    """Return the parameters in each group over all stages, as one process has them; ``None`` where stages leave open in
    which order. Collective.
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
            f"{path} has 8-bit states in blocks of full tensors, which this layout cannot shard: "
            "resume in one process, or from a checkpoint of hfscale.Trainer"
        )


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without the nested dictionaries of bitsandbytes."""
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
    """Return this rank's shard of a state of the full parameter: cut like it, or as hfscale's optimizers say."""
    if isinstance(value, TensorOnDisk):
        if value.shape != planned.shape:
            return value[...]
        value = ShareOnDisk(value, planned.cuts, ranks)[...]
        plain = bool(getattr(optimizer, "keeps_plain_state", False))
        return value if plain else like_sharded(value, parameter)
    if not isinstance(value, Tensor):
        return value
    if (
        value.ndim == 0
    ):  # a count of steps, which is added to in place, and may be of several parameters
        return value.clone()
    plain = bool(getattr(optimizer, "keeps_plain_state", False))
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
