"""Take a state from a run, and write it: every rank its file, and rank 0 what all of them agree on."""

import hashlib
import io
import pickle
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._host.transformers.saving import write_configs
from ..errors import CheckpointError
from ..files.complete import FileSum, write_synced
from ..files.writer import write_tensors
from ..mesh import Mesh
from ..plan.state_tensor import StateTensor
from ..runtime import Runtime
from ..runtime.full_tensors import tensors_to_save
from ..runtime.writing import is_writer, raise_together
from ..version import __version__
from .random_states import random_states
from .state_contents import StateContents, contents_of
from .state_directory import NewState, prune, staging_of
from .state_index import INDEX, StateIndex, rest_name, weights_name


@dataclass
class TakenState:
    """A state, taken from a run, and not written yet.

    Attributes:
        mesh: the ranks that write it.
        index: the same on every rank.
        tensors: what this rank writes.
        rest: what else this rank writes: a file's bytes.
        beside: files that lie beside a Hugging Face checkpoint's weights, by name; of the first rank.
    """

    mesh: Mesh
    index: StateIndex
    tensors: dict[str, Tensor]
    rest: bytes
    beside: dict[str, bytes]

    def write(self, directory: Path) -> dict[str, FileSum]:
        """Write this rank's files; they are on the disk afterwards."""
        rank = self.index.rank_of((), self.mesh.ranks)
        files = {rest_name(rank): write_synced(directory / rest_name(rank), self.rest)}
        if self.tensors:
            files[weights_name(rank)] = write_tensors(directory / weights_name(rank), self.tensors)
        if is_writer(self.mesh):
            for name, content in {INDEX: self.index.write(), **self.beside}.items():
                files[name] = write_synced(directory / name, content)
        return files


@dataclass
class _Told:
    """What a rank tells the others of a state."""

    failure: str
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[list[str]] | None = None
    others: dict[str, str] = field(default_factory=dict)


def take_state(
    runtime: Runtime, optimizer: torch.optim.Optimizer | None, step: int | None, others: dict[str, Any]
) -> TakenState:
    """What is to be written of a run as it is now; collective. Tensors are the run's own, not copies.

    Raises:
        CheckpointError: on every rank, if something of one rank's cannot be written.
    """
    contents, rest, digests, beside = StateContents(), b"", dict[str, str](), dict[str, bytes]()
    failure: Exception | None = None
    try:
        beside = _beside(runtime)
        contents = contents_of(runtime, optimizer)
        states = {name: other.state_dict() for name, other in others.items()}
        parts = {type(part).__name__: state for part in runtime.parts if (state := part.state(runtime))}
        rest = _plain_bytes(
            {"random": random_states(runtime.mesh), "others": states, "options": contents.options, "parts": parts}
        )
        digests = {name: _digest(state) for name, state in states.items()}
    except (CheckpointError, OSError) as error:  # of a temporary directory
        failure = error
    index = _agreed_index(runtime, contents, digests, failure)
    index.step = step
    _add_stored_names(index, runtime)
    return TakenState(runtime.mesh, index, contents.held, rest, beside)


def _beside(runtime: Runtime) -> dict[str, bytes]:
    """Configs, and code that came with the model."""
    if not is_writer(runtime.mesh):
        return {}
    with tempfile.TemporaryDirectory() as written:
        write_configs(runtime.model, Path(written))
        for part in runtime.parts:
            part.write_configs(runtime, Path(written))
        return {path.name: path.read_bytes() for path in sorted(Path(written).iterdir()) if path.is_file()}


def write_state(taken: TakenState, target: Path, keep_last: int | None, keep_every: int | None) -> None:
    """Write what was taken to ``target``; collective.

    Raises:
        CheckpointError: on every rank, if one could not; what ``target`` held is then still there.
    """
    mesh, new = taken.mesh, None
    failure: Exception | None = None
    try:
        if is_writer(mesh):
            try:
                new = NewState(target)
            except (OSError, CheckpointError) as error:
                failure = error
        raise_together(mesh, failure, target)
        files: dict[str, FileSum] = {}
        try:
            files = taken.write(staging_of(target))
        except (OSError, CheckpointError) as error:
            failure = error
        every = mesh.all_gather_object({name: (file.size, file.crc) for name, file in files.items()})
        raise_together(mesh, failure, target)
        if new is not None:
            try:
                new.commit({n: FileSum(*sums) for rank in every for n, sums in rank.items()}, taken.index.step)
                new = None
                prune(target, keep_last, keep_every)
            except (OSError, CheckpointError) as error:
                failure = error
        raise_together(mesh, failure, target)
    finally:
        if new is not None:
            new.give_up()


def _agreed_index(
    runtime: Runtime, contents: StateContents, digests: dict[str, str], failure: Exception | None
) -> StateIndex:
    """What is written, as all ranks know it; the first rank of each stage speaks for it."""
    mesh = runtime.mesh
    told = _Told(str(failure or ""), others=digests)
    if mesh.speaks_for_stage and failure is None:
        told.tensors = {key: tensor.told() for key, tensor in contents.tensors.items()}
        told.numbers, told.groups = contents.numbers, contents.groups
    every: list[_Told] = mesh.all_gather_object(told)
    if problems := [f"rank {rank}: {each.failure}" for rank, each in enumerate(every) if each.failure]:
        raise CheckpointError(f"the state cannot be taken: {problems[0]}") from failure
    index = StateIndex.of(mesh.layout, runtime.plan)
    index.versions = {"hfscale": __version__, "torch": str(torch.__version__)}
    index.others = {name: all(each.others.get(name) == digest for each in every) for name, digest in digests.items()}
    for each in every:
        _merge(index, each)
    # A rank may keep a state of what the first of its stage has none of.
    unheard = {key: contents.tensors[key].told() for key in contents.held if key not in index.tensors}
    for tensors in mesh.all_gather_object(unheard):
        _merge(index, _Told("", tensors))
    return index


def _add_stored_names(index: StateIndex, runtime: Runtime) -> None:
    """What a converter needs to know."""
    entries = tensors_to_save(runtime)  # collective
    names = (
        {} if not is_writer(runtime.mesh) else {k: v for p in runtime.parts for k, v in p.stored_names(runtime).items()}
    )
    if names:
        owned = {planned.name: planned.tied_to or planned.name for planned in runtime.plan.parameters}
        index.adapter, index.stored = True, {key: f"weights/{owned[name]}" for key, name in names.items()}
    else:
        index.stored = {e.name: f"weights/{e.planned.name}" if e.planned else f"buffers/{e.name}" for e in entries}


def _merge(index: StateIndex, told: _Told) -> None:
    """What is known already stays: of what several stages have, the first one's counts."""
    for key, tensor in told.tensors.items():
        index.tensors.setdefault(key, StateTensor.hear(tensor))
    for name, numbers in told.numbers.items():
        index.numbers.setdefault(name, numbers)
    if told.groups is not None:
        merged = index.groups if index.groups is not None else [[] for _ in told.groups]
        pairs = zip(merged, told.groups, strict=True)
        index.groups = [[*old, *(name for name in new if name not in set(old))] for old, new in pairs]


def _plain_bytes(content: dict[str, Any]) -> bytes:
    """As ``torch.save`` writes it, if ``torch.load(weights_only=True)`` reads it."""
    for name, state in content["others"].items():
        file = io.BytesIO()
        try:
            torch.save(state, file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"the state of {name!r} is not plain data (numbers, strings, tensors, lists, dicts): {error}"
            ) from error
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _digest(state: Any) -> str:
    """The same for equal states."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=repr):
                digest.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            digest.update(f"[{len(value)}".encode())
            for each in value:
                add(each)
        else:
            digest.update(repr(value).encode())

    add(state)
    return digest.hexdigest()
