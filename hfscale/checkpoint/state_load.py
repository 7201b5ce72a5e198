"""Check that a state fits this run, read this rank's shards into CPU memory, and then copy them into the run: either on
all ranks or on none.
"""

import copy
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, HFScaleError, in_words
from ..plan.state_tensor import StateTensor, like, own, whole
from ..train.runtime import Runtime, like_sharded, local_tensor
from ..train.runtime.writing import not_finite, warn_of_not_finite
from .random_states import random_states, restore_random_states
from .state_directory import find_whole
from .state_format import StateIndex, StateReader, rest_name
from .state_save import described, moved_parameters, state_lies, written_parameters

_COUNTED = ("step", "mu_product")  # scalars in the states of torch's optimizers


@dataclass(frozen=True)
class Resumed:
    """Describe the state from which a run was resumed: its directory and step, and whether the layout is the same."""

    directory: Path | None  # the state's directory; ``None`` if no state was loaded
    step: int | None  # the ``step`` passed to :func:`hfscale.save_state`
    batch_world: int  # number of distinct batches in a step when it was saved
    same_layout: bool  # whether the run continues bit by bit


def load_from(
    runtime: Runtime,
    source: Path,
    optimizer: torch.optim.Optimizer | None,
    others: dict[str, Any],
    verify: bool,
) -> Resumed:
    """Load a state: see :func:`hfscale.load_state`; collective."""
    directory = find_whole(source, runtime.mesh, verify)
    with _in_words_of(directory):
        reader = _Found(runtime, directory, optimizer, others)
        read = _ReadAside(reader, optimizer)
    read.warn_of_not_finite()
    with _unchanged_on_failure(runtime, optimizer, others), _in_words_of(directory):
        for name, other in others.items():
            other.load_state_dict(reader.rest["others"][name])
        restore_random_states(runtime.mesh, *reader.random)
        for part in runtime.parts:
            if state := reader.rest["parts"].get(part.state_key):
                part.put_state(runtime, state)
    runtime.streams.agreed = True  # as when the state was saved
    read.put_back(optimizer, reader.rest["options"])
    return Resumed(directory, reader.index.step, reader.index.batch_world, reader.alike)


@contextmanager
def _in_words_of(directory: Path) -> Iterator[None]:
    """Convert unexpected exceptions inside the ``with`` block to a :class:`CheckpointError` that names the state."""
    try:
        yield
    except (HFScaleError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{directory} cannot be loaded ({in_words(error)}): it is damaged, or from another run; use another state"
        ) from error


class _Found:
    """Check that a state fits the run, without changing the run."""

    def __init__(
        self,
        runtime: Runtime,
        directory: Path,
        optimizer: torch.optim.Optimizer | None,
        others: dict[str, Any],
    ) -> None:
        self.runtime = runtime
        self.mesh = runtime.mesh
        self.directory = directory
        self.reader = StateReader(directory)
        self.index = self.reader.index
        own = StateIndex.of_layout(self.mesh.layout, runtime.plan)
        self.alike = (self.index.sizes, self.index.layers) == (own.sizes, own.layers)
        self.parameters = {
            planned.name: (planned, parameter) for planned, parameter in runtime.parameters()
        }
        self._check_weights()
        self.buffers = dict(self._buffers())
        if self.alike:
            batch = rank = self.index.rank_of(self.mesh.ranks)
            seed = ""
        else:
            batch = self.index.rank_with_batch(self.mesh)
            rank, seed = self.index.rank_with_random_states(self.mesh)
        self.rest = self._rest(batch)
        if optimizer is not None:
            self._check_optimizer(optimizer)
        self.random = (self.rest if rank == batch else self._rest(rank))["random"], seed
        for name in others:
            self._check_other(name)

    def _check_weights(self) -> None:
        plan = self.runtime.plan
        frozen = plan.quantized_weights
        known = {
            f"weights/{planned.name}" for planned in plan.owned() if planned.name not in frozen
        }
        more = sorted(
            key for key in self.index.tensors if key.startswith("weights/") and key not in known
        )
        if more:
            raise CheckpointError(
                f"{self.directory} has {len(more)} parameters that this model lacks, for example "
                f"{more[0].partition('/')[2]}: build the model as it was when saved, with its adapters"
            )
        for planned, parameter in written_parameters(self.runtime):
            key = f"weights/{planned.name}"
            self.reader.check(key, like(planned))
            if (dtype := self.reader.dtype(key)) != parameter.dtype:
                raise CheckpointError(
                    f"{self.directory} stores {planned.name} in {dtype}, but this model has it in {parameter.dtype}: "
                    "build the model with the dtypes that it had when saved"
                )

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers to restore, by name. A buffer that the model computes and does not save may be missing, or
        have another shape, in a state of another layout; it is then left out.
        """
        saved = self.runtime.model.state_dict().keys()
        for name, here, buffer in self.runtime.named_buffers():
            key = f"buffers/{name}"
            written = self.index.tensors.get(key)
            fits = (
                written is not None
                and written.shape == buffer.shape
                and self.reader.dtype(key) == buffer.dtype
            )
            if fits:
                yield name, buffer
            elif here in saved or self.alike:
                raise CheckpointError(
                    f"{self.directory} has no buffer {name} of shape {tuple(buffer.shape)}, so the state belongs to "
                    "another model: give a state of this model"
                )

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        names = {
            id(parameter): planned.name for planned, parameter in written_parameters(self.runtime)
        }
        here = [
            {names.get(id(parameter), "") for parameter in group}
            for group in moved_parameters(optimizer)
        ]
        if self.index.groups is None:
            raise CheckpointError(
                f"{self.directory} holds no optimizer, because save_state was called without one: leave optimizer= "
                "out, or save a state with the optimizer"
            )
        name, options = described(optimizer)
        then, then_options = self.index.optimizer or (name, options)
        if then != name and then_options != options:
            raise CheckpointError(
                f"{self.directory} has the state of the optimizer {then} (options: {', '.join(then_options)}), which "
                f"the optimizer {name} (options: {', '.join(options)}) of this run cannot load: make a {then}, or "
                "leave optimizer= out to start with an empty state"
            )
        there = [set(group) & set(names.values()) for group in self.index.groups]
        if here != there or [isinstance(options, dict) for options in self.rest["options"]] != [
            True
        ] * len(here):
            raise CheckpointError(
                f"{self.directory} has an optimizer state for other parameters or groups than this run's optimizer "
                "has: build the optimizer as it was when saved"
            )
        for key, _, _, lies in self.states(optimizer):
            self.reader.check(key, lies)

    def states(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, Tensor, str, StateTensor]]:
        """Yield the saved optimizer state of this rank's parameters, one state tensor at a time: its key in the saved
        state, the parameter, its key in the optimizer's state (``exp_avg``), and how it is sharded.
        """
        for key, there in self.index.tensors.items():
            kind, _, rest = key.partition("/")
            state, _, name = rest.partition("/")
            if kind == "optimizer" and name in self.parameters:
                planned, parameter = self.parameters[name]
                lies = (
                    own(planned)
                    if there.own
                    else state_lies(optimizer, planned, state, there.shape, planned.shape)
                )
                yield key, parameter, state, lies

    def _rest(self, rank: int) -> dict[str, Any]:
        path = self.directory / rest_name(rank)
        try:
            with zipfile.ZipFile(path) as archive:
                if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
                    raise zipfile.BadZipFile(
                        "the archive would unpack to more bytes than the file has"
                    )
            contents: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{path} is damaged, or holds more than plain data, which is not read because it could run code: use "
                f"another state ({str(error).partition(chr(10))[0]})"
            ) from error
        kinds = {"random": dict, "others": dict, "options": list, "parts": dict}
        if wrong := [
            name for name, kind in kinds.items() if not isinstance(dict(contents).get(name), kind)
        ]:
            raise CheckpointError(
                f"{path} is damaged, because it lacks {' and '.join(wrong)}: use another state"
            )
        return contents

    def _check_other(self, name: str) -> None:
        if name not in self.rest["others"]:
            names = ", ".join(self.rest["others"]) or "nothing else"
            raise CheckpointError(
                f"{self.directory} holds {names} besides the model and the optimizer, but no {name!r}: leave this "
                "argument out, or save a state with it"
            )
        if name in self.index.shards and not self.alike:
            raise CheckpointError(
                f"{self.directory} has a state of {name!r} on each rank, with numbers of that rank's shards, which do "
                "not fit another layout: leave it out, and keep averages of weights in a torch optimizer's state, as "
                "optimizer.state[parameter]['ema'], which is read in any layout"
            )
        then = self.index.batch_world
        now = self.mesh.batch_world
        if then != now and not self.index.others[name]:
            raise CheckpointError(
                f"{self.directory} has {then} states of {name!r}, one for each group of ranks with a batch of its own, "
                f"but this run has {now} such groups: leave {name} out, and skip the batches that were seen, {then} "
                f"per step, divided over {now} groups (accelerate.skip_first_batches)"
            )


class _ReadAside:
    """Read this rank's shards of a state into separate CPU memory; the run stays unchanged until :meth:`put_back`
    copies them.
    """

    def __init__(self, found: _Found, optimizer: torch.optim.Optimizer | None) -> None:
        self.reader = found.reader
        self.runtime = found.runtime
        self._not_finite = ""
        self._copies: list[tuple[Tensor, Tensor]] = []  # source, destination
        self._states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for planned, parameter in written_parameters(self.runtime):
            self._copy_later(
                self._read(f"weights/{planned.name}", like(planned)),
                local_tensor(parameter.detach()),
            )
        for name, buffer in found.buffers.items():
            read = self.reader.read(
                f"buffers/{name}", whole(*buffer.shape), self.runtime.mesh.ranks
            )
            self._copy_later(read, buffer)
        if optimizer is None:
            return
        for name, numbers in found.index.numbers.items():
            if name in found.parameters:
                self._states[found.parameters[name][1]] = dict(numbers)
        for key, parameter, state, lies in found.states(optimizer):
            self._states[parameter][state] = self._read(key, lies)
        if not optimizer.state:
            self._move_optimizer_state(optimizer)

    def warn_of_not_finite(self) -> None:
        """Warn of the first tensor with NaN or infinity; collective, so after this call every rank has read its
        shards.
        """
        warn_of_not_finite(self.runtime.mesh, self._not_finite, f"{self.reader.directory}")

    @torch.no_grad()
    def put_back(
        self, optimizer: torch.optim.Optimizer | None, options: list[dict[str, Any]]
    ) -> None:
        """Copy the shards that were read into the model's parameters and buffers, and the optimizer's state and
        ``options`` of its groups into ``optimizer``.
        """
        try:
            for read, into in self._copies:
                into.copy_(read)
            if optimizer is None:
                return
            for group, saved in zip(optimizer.param_groups, options, strict=True):
                group.update(saved)
            if optimizer.state:
                optimizer.state.clear()
                self._move_optimizer_state(optimizer)
            optimizer.state.update(self._states)
        except Exception as error:
            raise CheckpointError(
                f"{self.reader.directory} was restored only in part ({in_words(error)}): load this state or another "
                "one again before the run continues"
            ) from error

    def _copy_later(self, read: Tensor, into: Tensor) -> None:
        if read.shape != into.shape:
            raise CheckpointError(
                f"{self.reader.directory} has a shard of shape {tuple(read.shape)}, but this rank's shard has the "
                f"shape {tuple(into.shape)}: the state is damaged, use another state"
            )
        self._copies.append((read, into))

    def _read(self, key: str, lies: StateTensor) -> Tensor:
        read = self.reader.read(key, lies, self.runtime.mesh.ranks)
        self._not_finite = self._not_finite or not_finite({key: read})
        return read

    @torch.no_grad()
    def _move_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the optimizer's state to the devices where the optimizer would have made it."""
        # Optimizers of hfscale: shapes of the state may differ from the shapes of shards.
        plain = getattr(optimizer, "keeps_plain_state", False)
        groups = {
            id(parameter): group
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for parameter, values in self._states.items():
            for state, value in values.items():
                if isinstance(value, Tensor):
                    share = local_tensor(parameter)
                    placed = _on_optimizer_device(
                        state, value, share, optimizer, groups[id(parameter)]
                    )
                    sharded = not plain and placed.ndim and placed.shape == share.shape
                    values[state] = like_sharded(placed, parameter) if sharded else placed


@contextmanager
def _unchanged_on_failure(
    runtime: Runtime, optimizer: torch.optim.Optimizer | None, others: dict[str, Any]
) -> Iterator[None]:
    """Restore the previous states of ``others``, of the RNG and of the model's features, and the options of the
    optimizer's groups, if the ``with`` block fails on any rank.
    """
    random = random_states(runtime.mesh)
    parts = [
        (part, copy.deepcopy(state)) for part in runtime.parts if (state := part.state(runtime))
    ]
    before = [
        (other, copy.deepcopy(other.state_dict()), dict(vars(other))) for other in others.values()
    ]
    groups = [] if optimizer is None else [(group, dict(group)) for group in optimizer.param_groups]
    try:
        yield
        runtime.mesh.all_gather_object(None)
    except Exception:
        for other, state, attributes in before:
            try:
                other.load_state_dict(state)
            except Exception:  # restoring may fail for the same reason
                vars(other).update(attributes)
        for part, state in parts:
            part.put_state(runtime, state)
        for group, options in groups:
            group.clear()
            group.update(options)
        restore_random_states(runtime.mesh, random)
        raise


def _on_optimizer_device(
    key: str, value: Tensor, parameter: Tensor, optimizer: Any, group: dict[str, Any]
) -> Any:
    """Return a value of an optimizer's state on the device where the optimizer would have made it."""
    if key in _COUNTED and not (group.get("fused") or group.get("capturable")):
        return value  # torch reads step counts on the CPU, and would synchronize with a device
    if getattr(optimizer, "is_paged", False) and value.shape == parameter.shape:
        return optimizer.get_state_buffer(parameter.detach(), dtype=value.dtype).copy_(value)
    return value.to(getattr(optimizer, "state_device", None) or parameter.device)
