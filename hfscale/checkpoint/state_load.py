"""Find a complete state, check that it fits this run, and load it: every rank reads just its shards."""

import logging
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed.files.complete import content_problems, read_mark
from ..distributed.mesh import Mesh
from ..errors import CheckpointError, HFScaleError, in_words
from ..parallel.tensor.part import RandomStreams
from ..plan.state_tensor import StateTensor, like, own
from ..train.runtime import Runtime
from ..train.runtime.writing import is_writer
from .random_states import restore_random_states, source_rank
from .state_contents import described, moved_parameters, parameters_of_state, state_lies, written_parameters
from .state_directory import candidates, problems_of
from .state_index import StateIndex, rest_name
from .state_reader import StateReader
from .state_restore import ReadAside, unchanged_on_failure

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """The state from which a run was resumed.

    Attributes:
        directory: of the state; ``None`` if there was none.
        step: the ``step`` passed to :func:`hfscale.save_state`.
        batch_world: number of distinct batches in a step when it was saved.
        same_layout: whether the run continues bit by bit.
    """

    directory: Path | None
    step: int | None
    batch_world: int
    same_layout: bool


def load_from(
    runtime: Runtime, source: Path, optimizer: torch.optim.Optimizer | None, others: dict[str, Any], verify: bool
) -> Resumed:
    """Load a state: see :func:`hfscale.load_state`; collective."""
    mesh = runtime.mesh
    directory = find_whole(source, mesh, verify)
    with _in_words_of(directory):
        found = _Found(runtime, directory, optimizer, others)
        read = ReadAside(found.reader, runtime, found.buffers)
        if optimizer is not None:
            read.add_optimizer(optimizer, found.states(optimizer))
    read.warn_of_not_finite()
    with unchanged_on_failure(runtime, optimizer, others), _in_words_of(directory):
        for name, other in others.items():
            other.load_state_dict(found.rest["others"][name])
        restore_random_states(mesh, *found.random)
        for part in runtime.parts:
            if state := found.rest["parts"].get(part.state_key):
                part.put_state(runtime, state)
    if (streams := runtime.part(RandomStreams)) is not None:
        streams.agreed = True  # as they were when the state was saved
    read.put_back(optimizer, found.rest["options"])
    return Resumed(directory, found.index.step, found.index.batch_world, found.alike)


@contextmanager
def _in_words_of(directory: Path) -> Iterator[None]:
    """Convert unexpected exceptions inside the `with` block to a CheckpointError that names the state."""
    try:
        yield
    except (HFScaleError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{directory} cannot be loaded ({in_words(error)}): it is damaged, or from another run; use another state"
        ) from error


def none_there(source: Path, mesh: Mesh) -> bool:
    """Return whether the first rank finds no state in ``source``, complete or not; the same answer on every rank."""

    def nothing() -> bool:
        try:
            return not candidates(source)
        except CheckpointError:
            return True

    return bool(mesh.all_gather_object(nothing() if is_writer(mesh) else False)[0])


def find_whole(source: Path, mesh: Mesh, verify: bool) -> Path:
    """Return the newest complete state that ``source`` may mean; the same on every rank.

    Raises:
        CheckpointError: there is none; it says what is wrong with each.
    """
    every = mesh.all_gather_object(candidates(source) if is_writer(mesh) else [])[0]
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
    raise CheckpointError(f"{_in_words(wrong)}: there is no complete state in {source}")


def _changed(directory: Path, mesh: Mesh) -> list[str]:
    """Return checksum problems of the files that this rank has to read."""
    rank = mesh.device_mesh.get_rank() if mesh.device_mesh is not None else 0
    try:
        mark = read_mark(directory)
    except CheckpointError as error:
        return [f"{error} (as rank {rank} sees it)"]
    return content_problems(directory, mark, sorted(mark.files)[rank :: mesh.layout.total_size])


def _in_words(wrong: dict[Path, list[str]]) -> str:
    return "; ".join(f"{path} cannot be used: {', '.join(problems)}" for path, problems in wrong.items())


class _Found:
    """A state that fits the run: the constructor checks everything, and changes nothing."""

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
        batch, part = self.source_of_batch, source_rank(self.mesh, self.index, self.alike)
        self.rest = self._rest(batch)
        if optimizer is not None:
            self._check_optimizer(optimizer)
        self.random = (self.rest["random"] if part[0] == batch else self._rest(part[0])["random"], part[1])
        for name in others:
            self._check_other(name)

    @property
    def source_of_batch(self) -> int:
        """The rank of the saved run that had this rank's batches; the first one if none had."""
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
        """Yield the buffers to restore: those that are computed and not saved may differ in another layout."""
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
        name, options = described(optimizer)
        then, then_options = self.index.optimizer or (name, options)
        if then != name and then_options != options:
            raise CheckpointError(
                f"{self.directory} was written by the optimizer {then} ({', '.join(then_options)}), and this one is "
                f"{name} ({', '.join(options)}), which would not find its state there: make a {then}, or leave "
                "optimizer= out and begin with an empty one"
            )
        there = [set(group) & set(names.values()) for group in self.index.groups]
        if here != there or [isinstance(options, dict) for options in self.rest["options"]] != [True] * len(here):
            raise CheckpointError(
                f"{self.directory} was written by an optimizer over other parameters or groups: build it as it was "
                "built then"
            )
        for key, _, _, lies in self.states(optimizer):
            self.reader.check(key, lies)

    def states(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, str, StateTensor]]:
        """Yield the saved optimizer state of this rank's parameters, as :class:`ReadAside` takes it."""
        for key, name, state in parameters_of_state(self.index.tensors):
            if name in self.parameters:
                planned, parameter = self.parameters[name]
                there = self.index.tensors[key]
                lies = own(planned) if there.own else state_lies(optimizer, planned, state, there.shape, planned.shape)
                yield key, parameter, state, lies

    def _rest(self, rank: int) -> dict[str, Any]:
        path = self.directory / rest_name(rank)
        try:
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{path} is damaged, or holds more than plain data, which is not read because it could run code: use "
                f"another state ({str(error).partition(chr(10))[0]})"
            ) from error
        kinds = {"random": dict, "others": dict, "options": list, "parts": dict}
        if wrong := [name for name, kind in kinds.items() if not isinstance(dict(found).get(name), kind)]:
            raise CheckpointError(f"{path} is damaged, it has no {' and no '.join(wrong)}: use another state")
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
