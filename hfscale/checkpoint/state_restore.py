"""Read a state into memory, and copy it into a run once every rank has read its shards: on all ranks, or on none."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, in_words
from ..plan.state_tensor import StateTensor, like, whole
from ..train.runtime import Runtime, like_sharded
from ..train.runtime.shards import local_tensor
from ..train.runtime.writing import not_finite, warn_of_not_finite
from .random_states import random_states, restore_random_states
from .state_contents import written_parameters
from .state_reader import StateReader

_COUNTED = ("step", "mu_product")  # scalars in the states of torch's optimizers

States = Iterable[tuple[str, Tensor, str, StateTensor]]
"""Tensors of an optimizer: key in the index, parameter, the optimizer's key, and how this layout shards it."""


class ReadAside:
    """This rank's shards of a state; the run is unchanged until :meth:`put_back`.

    They are in CPU memory. Those of an optimizer without state go to their device at once, where they take no room
    twice.
    """

    def __init__(self, reader: StateReader, runtime: Runtime, buffers: dict[str, Tensor]) -> None:
        self.reader, self.runtime = reader, runtime
        self._not_finite = ""
        self._copies: list[tuple[Tensor, Tensor]] = []  # source, destination
        self._states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for planned, parameter in written_parameters(runtime):
            self._copy_later(self._read(f"weights/{planned.name}", like(planned)), local_tensor(parameter.detach()))
        for name, buffer in buffers.items():
            self._copy_later(reader.read(f"buffers/{name}", whole(*buffer.shape), runtime.mesh.ranks), buffer)

    def add_optimizer(self, optimizer: torch.optim.Optimizer, states: States) -> None:
        """Read the optimizer's state of this rank's parameters."""
        here = {planned.name: parameter for planned, parameter in self.runtime.parameters()}
        for name, numbers in self.reader.index.numbers.items():
            if name in here:
                self._states[here[name]] = dict(numbers)
        for key, parameter, state, lies in states:
            self._states[parameter][state] = self._read(key, lies)
        if not optimizer.state:
            self._place(optimizer)

    def warn_of_not_finite(self) -> None:
        """Warn of the first tensor with NaN or infinity; collective, so afterwards every rank has read its shards."""
        warn_of_not_finite(self.runtime.mesh, self._not_finite, f"{self.reader.directory}")

    @torch.no_grad()
    def put_back(self, optimizer: torch.optim.Optimizer | None, options: list[dict[str, Any]]) -> None:
        """Copy everything into the run."""
        try:
            for read, into in self._copies:
                into.copy_(read)
            if optimizer is None:
                return
            for group, saved in zip(optimizer.param_groups, options, strict=True):
                group.update(saved)
            if optimizer.state:
                optimizer.state.clear()
                self._place(optimizer)
            optimizer.state.update(self._states)
        except Exception as error:
            raise CheckpointError(
                f"{self.reader.directory} was read, and put back in part only ({in_words(error)}): load a state again "
                "before the run goes on"
            ) from error

    def _copy_later(self, read: Tensor, into: Tensor) -> None:
        if read.shape != into.shape:
            raise CheckpointError(
                f"{self.reader.directory} has a share of shape {tuple(read.shape)} where this rank's has "
                f"{tuple(into.shape)}: it is damaged, use another state"
            )
        self._copies.append((read, into))

    def _read(self, key: str, lies: StateTensor) -> Tensor:
        read = self.reader.read(key, lies, self.runtime.mesh.ranks)
        self._not_finite = self._not_finite or not_finite({key: read})
        return read

    @torch.no_grad()
    def _place(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the optimizer's state to the devices where the optimizer would have made it."""
        plain = getattr(optimizer, "keeps_plain_state", False)  # hfscale's: shapes may differ from shards'
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, values in self._states.items():
            for state, value in values.items():
                if isinstance(value, Tensor):
                    placed = _placed(state, value, local_tensor(parameter), optimizer, groups[id(parameter)])
                    values[state] = placed if plain else _like(placed, parameter)


@contextmanager
def unchanged_on_failure(
    runtime: Runtime, optimizer: torch.optim.Optimizer | None, others: dict[str, Any]
) -> Iterator[None]:
    """Restore ``others``, RNG states, states of parts and options of groups if the `with` block fails on some rank."""
    random = random_states(runtime.mesh)
    parts = [(part, copy.deepcopy(state)) for part in runtime.parts if (state := part.state(runtime))]
    before = [(other, copy.deepcopy(other.state_dict()), dict(vars(other))) for other in others.values()]
    groups = [] if optimizer is None else [(group, dict(group)) for group in optimizer.param_groups]
    try:
        yield
        runtime.mesh.all_gather_object(None)
    except Exception:
        for other, state, attributes in before:
            try:
                other.load_state_dict(state)
            except Exception:  # it may fail as it failed before
                vars(other).update(attributes)
        for part, state in parts:
            part.put_state(runtime, state)
        for group, options in groups:
            group.clear()
            group.update(options)
        restore_random_states(runtime.mesh, random)
        raise


def _placed(key: str, value: Tensor, parameter: Tensor, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
    """Return a value of an optimizer's state on the device where the optimizer would have made it."""
    if key in _COUNTED and not (group.get("fused") or group.get("capturable")):
        return value  # torch reads them on the CPU, and would sync with a device
    if getattr(optimizer, "is_paged", False) and value.shape == parameter.shape:
        paged: Any = optimizer
        buffer: Tensor = paged.get_state_buffer(parameter.detach(), dtype=value.dtype)
        return buffer.copy_(value)
    return value.to(getattr(optimizer, "state_device", None) or parameter.device)


def _like(value: Tensor, parameter: Tensor) -> Any:
    """Return an optimizer's value, as a DTensor if its shape is that of a DTensor parameter's shard."""
    if value.ndim == 0 or value.shape != local_tensor(parameter).shape:
        return value
    return like_sharded(value, parameter)
