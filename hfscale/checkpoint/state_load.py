"""Find a whole state, check that it is this run's, and put it back: every rank reads just its shares."""

import logging
import pickle
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..files.complete import content_problems, read_mark
from ..mesh import Mesh
from ..plan import ParameterPlan
from ..plan.state_tensor import StateTensor, like, own, whole
from ..runtime import Runtime, like_sharded
from ..runtime.shards import local_tensor
from ..runtime.writing import is_writer
from .random_states import restore_random_states, source_rank
from .state_contents import moved_parameters, parameters_of_state, state_lies, written_parameters
from .state_directory import candidates, problems_of
from .state_index import StateIndex, rest_name
from .state_reader import StateReader

_COUNTED = ("step", "mu_product")  # in the states of torch's optimizers
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """Where a run was put back.

    Attributes:
        directory: of the state; ``None`` where there was none.
        step: what :func:`hfscale.save_state` was told.
        batch_world: distinct batches in a step, as it was then.
        same_layout: whether the run goes on bit by bit.
    """

    directory: Path | None
    step: int | None
    batch_world: int
    same_layout: bool


def load_from(
    runtime: Runtime, source: Path, optimizer: torch.optim.Optimizer | None, others: dict[str, Any], verify: bool
) -> Resumed:
    """See :func:`hfscale.load_state`; collective."""
    mesh = runtime.mesh
    directory = find_whole(source, mesh, verify)
    found = together(mesh, lambda: _Found(runtime, directory, optimizer, others))
    found.put_back_weights()
    if optimizer is not None:
        found.put_back_optimizer(optimizer)
    for name, other in others.items():
        other.load_state_dict(found.rest["others"][name])
    restore_random_states(mesh, *found.random)
    for part in runtime.parts:
        part.before_state(runtime, resumed=True)
        if state := found.rest["parts"].get(type(part).__name__):
            part.put_state(runtime, state)
    return Resumed(directory, found.index.step, found.index.batch_world, found.alike)


def none_there(source: Path, mesh: Mesh) -> bool:
    """Whether the first rank sees no state in ``source``, whole or not; the same answer on every rank."""

    def nothing() -> bool:
        try:
            return not candidates(source)
        except CheckpointError:
            return True

    return bool(mesh.all_gather_object(nothing() if is_writer(mesh) else False)[0])


def find_whole(source: Path, mesh: Mesh, verify: bool) -> Path:
    """The newest whole state that ``source`` may mean; the same on every rank.

    Raises:
        CheckpointError: there is none; it says what is wrong with each.
    """
    every = together(mesh, lambda: candidates(source) if is_writer(mesh) else [])
    every = mesh.all_gather_object(every)[0]
    wrong: dict[Path, list[str]] = {}
    for directory in every:
        problems = mesh.all_gather_object(problems_of(directory) if is_writer(mesh) else [])[0]
        if not problems and verify:
            problems = [each for told in mesh.all_gather_object(_changed(directory, mesh)) for each in told]
        if not problems:
            if wrong and is_writer(mesh):
                _log.warning("%s. Resuming from %s", _in_words(wrong), directory)
            return directory
        wrong[directory] = problems
    raise CheckpointError(f"{_in_words(wrong)}: there is no whole state in {source}")


def _changed(directory: Path, mesh: Mesh) -> list[str]:
    """What is wrong with the bytes of the files that fall to this rank to read."""
    rank = mesh.device_mesh.get_rank() if mesh.device_mesh is not None else 0
    try:
        mark = read_mark(directory)
    except CheckpointError as error:
        return [f"{error} (as rank {rank} sees it)"]
    return content_problems(directory, mark, sorted(mark.files)[rank :: mesh.layout.total_size])


def _in_words(wrong: dict[Path, list[str]]) -> str:
    return "; ".join(f"{path} cannot be used: {', '.join(problems)}" for path, problems in wrong.items())


def together(mesh: Mesh, work: Callable[[], _Result]) -> _Result:
    """What ``work`` returns, unless it fails on some rank: then it has failed on all.

    Raises:
        CheckpointError: on every rank.
    """
    result, failure = None, None
    try:
        result = work()
    except CheckpointError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(f"the state cannot be read: {error}")
    every = [text for text in mesh.all_gather_object(str(failure or "")) if text]
    if failure is not None:
        raise failure
    if every:
        raise CheckpointError(every[0])
    return result  # type: ignore[return-value]


class _Found:
    """A state that fits the run: everything is checked when it is made, and nothing changed."""

    def __init__(
        self, runtime: Runtime, directory: Path, optimizer: torch.optim.Optimizer | None, others: dict[str, Any]
    ) -> None:
        self.runtime, self.mesh, self.directory = runtime, runtime.mesh, directory
        self.index = StateIndex.read(directory)
        self.reader = StateReader(directory, self.index)
        self.alike = self.index.placed_alike(StateIndex.of(self.mesh.layout, runtime.plan))
        self.parameters = {planned.name: (planned, parameter) for planned, parameter in runtime.parameters()}
        self._check_weights()
        self.buffers = dict(self._buffers())
        if optimizer is not None:
            self._check_optimizer(optimizer)
        batch, part = self.source_of_batch, source_rank(self.mesh, self.index, self.alike)
        self.rest = self._rest(batch)
        self.random = (self.rest["random"] if part[0] == batch else self._rest(part[0])["random"], part[1])
        for name in others:
            self._check_other(name)

    @property
    def source_of_batch(self) -> int:
        """The rank then that had the batches that this one is given, or, if none had, the first."""
        if self.alike:
            return self.index.rank_of((), self.mesh.ranks)
        if self.mesh.batch_world != self.index.batch_world:
            return 0
        replicate, shard = divmod(self.mesh.batch_rank * self.index.sizes["cp"], self.index.sizes["dp_shard"])
        return self.index.rank_of((), {"dp_replicate": replicate, "dp_shard": shard})

    def _check_weights(self) -> None:
        plan = self.runtime.plan
        frozen = plan.quantized.weights if plan.quantized is not None else ()
        known = {f"weights/{planned.name}" for planned in plan.owned() if planned.name not in frozen}
        more = sorted(key for key in self.index.tensors if key.startswith("weights/") and key not in known)
        if more:
            raise CheckpointError(
                f"{self.directory} has {len(more)} parameters that this model has not, {more[0].partition('/')[2]} for "
                "one: it is of another model, or of this one with adapters, so build the model as it was built then"
            )
        for planned, parameter in written_parameters(self.runtime):
            key = f"weights/{planned.name}"
            self.reader.check(key, like(planned))
            if (dtype := self.reader.dtype(key)) != parameter.dtype:
                raise CheckpointError(
                    f"{self.directory} has {planned.name} in {dtype} and this model in {parameter.dtype}: it is of "
                    "another model, or of this one in another type, so build the model as it was built then"
                )

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those to be put back: what a model computes and does not save need not be the same in another layout."""
        saved = self.runtime.model.state_dict().keys()
        for name, buffer in self.runtime.model.named_buffers():
            key = f"buffers/{name}"
            written = self.index.tensors.get(key)
            fits = written is not None and written.shape == buffer.shape and self.reader.dtype(key) == buffer.dtype
            if fits:
                yield name, buffer
            elif name in saved or self.alike:
                raise CheckpointError(
                    f"{self.directory} has no {name} of shape {tuple(buffer.shape)}: it is of another model"
                )

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): planned.name for planned, parameter in written_parameters(self.runtime)}
        here = [{names.get(id(parameter), "") for parameter in group} for group in moved_parameters(optimizer)]
        if self.index.groups is None:
            raise CheckpointError(f"{self.directory} holds no optimizer: save_state was called without it")
        there = [set(group) & set(names.values()) for group in self.index.groups]
        if here != there:
            raise CheckpointError(
                f"{self.directory} was written by an optimizer over other parameters or groups: build it as it was "
                "built then"
            )
        for key, planned, state in self._own_states():
            self.reader.check(key, self._lies(optimizer, key, planned, state))

    def _own_states(self) -> Iterator[tuple[str, ParameterPlan, str]]:
        for key, name, state in parameters_of_state(self.index.tensors):
            if name in self.parameters:
                yield key, self.parameters[name][0], state

    def _lies(self, optimizer: torch.optim.Optimizer, key: str, planned: ParameterPlan, state: str) -> StateTensor:
        written = self.index.tensors[key]
        return own(planned) if written.own else state_lies(optimizer, planned, state, written.shape, planned.shape)

    def _rest(self, rank: int) -> dict[str, Any]:
        path = self.directory / rest_name(rank)
        try:
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{path} is damaged, or holds more than plain data, which is not read because it could run code: use "
                f"another state ({str(error).partition(chr(10))[0]})"
            ) from error
        return found

    def _check_other(self, name: str) -> None:
        if name not in self.rest["others"]:
            names = ", ".join(self.rest["others"]) or "nothing else"
            raise CheckpointError(f"{self.directory} holds {names}, and no {name!r}")
        then, now = self.index.batch_world, self.mesh.batch_world
        if then != now and not self.index.others[name]:
            raise CheckpointError(
                f"{self.directory} holds a {name!r} for each of {then} distinct batches of a step, and this run has "
                f"{now}: leave {name} out, and skip what was seen: {then} batches of each step done, shared by {now} "
                "(accelerate.skip_first_batches)"
            )

    def put_back_weights(self) -> None:
        """Parameters and buffers; copied one by one, so that a second model is nowhere."""
        with torch.no_grad():
            for planned, parameter in written_parameters(self.runtime):
                share = local_tensor(parameter)
                read = self.reader.read(f"weights/{planned.name}", like(planned), self.mesh.ranks, into=share)
                if read is not share:
                    share.copy_(read)
            for name, buffer in self.buffers.items():
                buffer.copy_(self.reader.read(f"buffers/{name}", whole(*buffer.shape), self.mesh.ranks))

    @torch.no_grad()
    def put_back_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """What it keeps of parameters, and the options of its groups."""
        for group, options in zip(optimizer.param_groups, self.rest["options"], strict=True):
            group.update(options)
        optimizer.state.clear()
        plain = getattr(optimizer, "keeps_plain_state", False)  # hfscale's own: some are of other shapes than shares
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        for name, numbers in self.index.numbers.items():
            if name in self.parameters:
                optimizer.state[self.parameters[name][1]] = dict(numbers)
        for key, planned, state in self._own_states():
            parameter: Any = self.parameters[planned.name][1]
            share = self.reader.read(key, self._lies(optimizer, key, planned, state), self.mesh.ranks)
            value = _placed(state, share, local_tensor(parameter), optimizer, groups[id(parameter)])
            optimizer.state[parameter][state] = value if plain else _like(value, parameter)


def _placed(key: str, value: Tensor, parameter: Tensor, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
    """A value of an optimizer's state where the optimizer itself would have made it."""
    if key in _COUNTED and not (group.get("fused") or group.get("capturable")):
        return value  # torch reads them on the host, which would wait for a device
    if getattr(optimizer, "is_paged", False) and value.shape == parameter.shape:
        paged: Any = optimizer
        buffer: Tensor = paged.get_state_buffer(parameter.detach(), dtype=value.dtype)
        return buffer.copy_(value)
    return value.to(getattr(optimizer, "state_device", None) or parameter.device)


def _like(value: Tensor, parameter: Tensor) -> Any:
    """An optimizer's value, as a sharded tensor where it has the shape of a sharded parameter's share."""
    if value.ndim == 0 or value.shape != local_tensor(parameter).shape:
        return value
    return like_sharded(value, parameter)
