"""Take a rank's state of a run, agree on the index of all ranks' states, and write them.

Taking the state needs no communication and copies only data that are not tensors, so that an asynchronous save can copy
and write the tensors later.
"""

import hashlib
import io
import pickle
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .._compat.transformers.stored import write_configs
from ..distributed.files.complete import FileSum, write_synced
from ..distributed.files.directories import staging_of
from ..distributed.files.replace import ADAPTER_CONFIG
from ..distributed.files.writer import write_tensors
from ..distributed.mesh import Mesh
from ..errors import CheckpointError
from ..features.adapters.several import config_in_state, directories_of
from ..features.adapters.storage import write_adapter_config
from ..plan import ParameterPlan
from ..plan.state_tensor import StateTensor, like, own, whole
from ..train.runtime import Runtime, local_tensor
from ..train.runtime.full_tensors import in_order, tensors_of_stage
from ..train.runtime.writing import all_or_none, not_finite, warn_of_not_finite
from .coverage import carried_by
from .random_states import random_states
from .state_directory import NewState, prune
from .state_format import INDEX, StateIndex, is_written_by, rest_name, weights_name


@dataclass
class TakenState:
    """Hold what this rank writes of a run's state, before it is written: shards of tensors, and data that are no
    tensors.
    """

    mesh: Mesh  # the ranks that write the state
    runtime: Runtime
    index: (
        StateIndex  # covers the tensors of this rank's stage and the rest of its optimizer's state
    )
    # Key -> the shard that this rank writes, or a copy of the shard.
    held: dict[str, Tensor] = field(default_factory=dict)
    options: list[dict[str, Any]] = field(default_factory=list)  # options of the optimizer's groups
    digests: dict[str, str] = field(
        default_factory=dict
    )  # digests of other objects' states, by name
    numeric: set[str] = field(default_factory=set)  # names of states with floating-point tensors
    rest: bytes = b""  # the bytes of this rank's ``.pt`` file: RNG states, other objects
    # This rank's names of the tensors of a checkpoint.
    entries: list[tuple[Any, ...]] = field(default_factory=list)
    # On rank 0, for adapters: key in the adapter's file -> parameter.
    stored: dict[str, str] = field(default_factory=dict)
    # Config files, by name; on the first rank.
    beside: dict[str, bytes] = field(default_factory=dict)

    def add(self, key: str, tensor: StateTensor, home: int, share: Tensor) -> None:
        """Add a tensor of the pipeline stage with index ``home`` to the state's index. If this rank writes its shard
        ``share`` of the tensor, keep the shard.
        """
        tensor = self.index.tensors[key] = replace(tensor, home=home)
        if not tensor.own and tuple(share.shape) != (shape := tensor.local_shape(self.mesh.ranks)):
            raise CheckpointError(
                f"{key} must keep its shape {shape} on this rank, got {tuple(share.shape)}: do not replace parameters "
                "after the model was built"
            )
        if is_written_by(self.mesh, tensor):
            self.held[key] = share


@torch.no_grad()  # with autograd, to_local() of DTensors took a third of the time
def contents_of(runtime: Runtime, optimizer: torch.optim.Optimizer | None) -> TakenState:
    """Collect the tensors to write of a model and its optimizer, without copies."""
    mesh = runtime.mesh
    plan = runtime.plan
    taken = TakenState(mesh, runtime, StateIndex.of_layout(mesh.layout, plan))
    for planned, parameter in written_parameters(runtime):
        share = local_tensor(parameter).detach()
        taken.add(f"weights/{planned.name}", like(planned), plan.primary_rank(planned.name), share)
    for name, _, buffer in runtime.named_buffers():
        taken.add(f"buffers/{name}", whole(*buffer.shape), mesh.pp_rank, buffer)
    if optimizer is not None:
        _add_optimizer(taken, runtime, optimizer)
    return taken


def written_parameters(runtime: Runtime) -> list[tuple[ParameterPlan, Tensor]]:
    """Return the parameters that a state contains: all but frozen weights in 4 or 8 bits, which a resume reads from the
    model's checkpoint.
    """
    frozen = runtime.plan.quantized_weights
    return [
        (planned, parameter)
        for planned, parameter in runtime.parameters()
        if planned.name not in frozen
    ]


def _add_optimizer(found: TakenState, runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    plans = {id(parameter): planned for planned, parameter in written_parameters(runtime)}
    given = moved_parameters(optimizer)
    strange = {id(parameter) for group in given for parameter in group} - plans.keys()
    if strange:
        raise CheckpointError(
            f"the optimizer has {len(strange)} parameters that do not belong to the model: give them to a second "
            "optimizer, and pass that optimizer to save_state by another keyword"
        )
    for parameter, values in optimizer.state.items():
        planned = plans.get(id(parameter))
        # Skip frozen weights in 4 or 8 bits: Adagrad has state for all parameters from the beginning.
        if planned is None:
            continue
        home = runtime.plan.primary_rank(planned.name)
        share = tuple(local_tensor(parameter).shape)
        for key, value in values.items():
            if isinstance(value, Tensor):
                held = local_tensor(value).detach()
                lies = state_lies(optimizer, planned, key, tuple(held.shape), share)
                found.add(f"optimizer/{key}/{planned.name}", lies, home, held)
            elif value is None or isinstance(value, bool | int | float | str):
                found.index.numbers.setdefault(planned.name, {})[key] = value
            else:
                raise CheckpointError(
                    f"the optimizer keeps a {type(value).__name__} as {key!r} of {planned.name}, which is neither a "
                    "tensor nor a number: leave optimizer= out, and pass an object whose state_dict returns the "
                    "optimizer's state as plain data by another keyword"
                )
    found.index.groups = [[plans[id(parameter)].name for parameter in group] for group in given]
    found.index.optimizer = described(optimizer)
    found.options = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]


def described(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return an optimizer's name and the names of its options. The states of two optimizers are compatible if these are
    equal.
    """
    return [
        str(getattr(optimizer, "name", type(optimizer).__name__)),
        sorted(optimizer.defaults),
    ]


def moved_parameters(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return, for each group, the parameters that the optimizer may update: all but frozen weights in 4 or 8 bits."""
    return [
        [
            parameter
            for parameter in group["params"]
            if parameter.is_floating_point() or parameter.requires_grad
        ]
        for group in optimizer.param_groups
    ]


def state_lies(
    optimizer: Any,
    planned: ParameterPlan,
    key: str,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
) -> StateTensor:
    """Return how the state tensor ``key`` that an optimizer keeps for a parameter is sharded. ``shape`` is the shape of
    the state tensor, and ``weight`` the shape of the parameter: both are shapes of shards, or both are full shapes.
    """
    if getattr(optimizer, "state_layout", None) is not None:
        return optimizer.state_layout(planned, key, shape)
    if not shape or not planned.cuts:
        return whole(*shape)
    # bitsandbytes' own optimizers choose from the shard's size whether a state has 8 bits or 32.
    alike = shape == weight and not type(optimizer).__module__.startswith("bitsandbytes")
    return like(planned) if alike else own(planned)


def take_state(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer | None,
    step: int | None,
    others: dict[str, Any],
) -> TakenState:
    """Return this rank's present state of a run. Tensors are references to the run's tensors; all other data are
    copied.
    """
    taken = contents_of(runtime, optimizer)
    taken.index.step = step
    if (carried := carried_by(runtime.model)) is not None:
        taken.index.carried = [str(carried.directory.absolute()), sorted(carried.names)]
    states = {name: other.state_dict() for name, other in others.items()}
    parts = {part.state_key: state for part in runtime.parts if (state := part.state(runtime))}
    random = random_states(runtime.mesh)
    taken.rest = _plain_bytes(
        {"random": random, "others": states, "options": taken.options, "parts": parts}
    )
    taken.digests = {name: _digest(state) for name, state in states.items()}
    taken.numeric = {name for name, state in states.items() if _holds_numbers(state)}
    taken.entries = tensors_of_stage(runtime)
    if runtime.mesh.is_first:
        adapters = runtime.adapters
        # Config files, and custom code of the model.
        with tempfile.TemporaryDirectory() as written:
            write_configs(runtime.model, Path(written))
            if adapters is not None:
                taken.stored = adapters.stored_names(runtime)
                for name, directory in directories_of(adapters.names, Path(written)).items():
                    directory.mkdir(exist_ok=True)
                    write_adapter_config(adapters.whole, name, directory)
                    place = str(directory.relative_to(written)).removeprefix(".")
                    config = directory / ADAPTER_CONFIG
                    config.rename(Path(written) / config_in_state(place))
            files = (path for path in sorted(Path(written).iterdir()) if path.is_file())
            taken.beside = {path.name: path.read_bytes() for path in files}
    return taken


def _plain_bytes(content: dict[str, Any]) -> bytes:
    """Return the bytes of ``torch.save``, if ``torch.load(weights_only=True)`` can read them."""
    for name, state in content["others"].items():
        file = io.BytesIO()
        try:
            torch.save(state, file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"the state of {name!r} is not plain data (numbers, strings, tensors, lists, dicts): {error}: change "
                "what its state_dict returns, or leave it out"
            ) from error
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _digest(state: Any) -> str:
    """Return a digest that is equal for equal states."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(
                value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, dict):
            for key in sorted(value, key=repr):
                digest.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            digest.update(f"[{len(value)}".encode())
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(state)
    return digest.hexdigest()


def _holds_numbers(state: Any) -> bool:
    """Return whether a state contains a floating-point tensor, unlike those of schedules, loaders and clocks."""
    if isinstance(state, Tensor):
        return state.is_floating_point()
    held = state.values() if isinstance(state, dict) else state
    return isinstance(state, dict | list | tuple) and any(map(_holds_numbers, held))


class SpreadFiles(Protocol):
    """Write a state's directory on several hosts without a common disk, and copy files between hosts."""

    makes: bool  # whether this rank creates the directories of its host

    def copy_to_next(
        self, mesh: Mesh, every: list[dict[str, FileSum]], directory: Path
    ) -> dict[str, FileSum]:
        """Send the files that each rank has written (``every``) to the next host; return all files of this host."""
        ...


def write_state(
    taken: TakenState,
    target: Path,
    keep_last: int | None,
    keep_every: int | None,
    hosts: SpreadFiles | None = None,
) -> None:
    """Write a state to the directory ``target``, each rank its own files; if a rank fails, the directory stays
    unchanged. With ``hosts`` (hosts without a common disk), each host gets an index and copies of another host's files.
    """
    mesh = taken.mesh
    run = taken.runtime.run
    new = None
    makes = mesh.is_first if hosts is None else hosts.makes
    with all_or_none(mesh, f"{target} could not be written"):
        try:
            if makes:
                new = NewState(target)
            # Collective, so after this call the directory exists for every rank.
            index = agreed_index(taken)
            every = mesh.all_gather_object(_write_own(taken, index, staging_of(target), makes))
            files = {name: file for rank in every for name, file in rank.items()}
            if hosts is not None:
                files = hosts.copy_to_next(mesh, every, staging_of(target))
            if new is not None:
                new.commit(files, taken.index.step, run)
                new = None
            numbers = {
                key: share for key, share in taken.held.items() if not key.startswith("buffers/")
            }
            warn_of_not_finite(mesh, not_finite(numbers), str(target))
        finally:
            if new is not None:
                new.give_up()
    with all_or_none(mesh, f"{target} is written, and older states beside it could not be removed"):
        if makes:
            prune(target, run, keep_last, keep_every)


def _write_own(
    taken: TakenState, index: StateIndex, directory: Path, makes: bool
) -> dict[str, FileSum]:
    """Write this rank's files and fsync them; and the index and config files if this rank ``makes`` the directory."""
    rank = index.rank_of(taken.mesh.ranks)
    files = {rest_name(rank): write_synced(directory / rest_name(rank), taken.rest)}
    if taken.held:
        files[weights_name(rank)] = write_tensors(directory / weights_name(rank), taken.held)
    if makes:
        for name, content in {INDEX: index.write(), **taken.beside}.items():
            files[name] = write_synced(directory / name, content)
    return files


def agreed_index(taken: TakenState) -> StateIndex:
    """Return the index, the same on every rank; collective. The first rank of each stage contributes its tensors."""
    mesh = taken.mesh
    own_part = taken.index
    told: dict[str, Any] = {
        "batch": mesh.batch_rank,
        "numeric": taken.numeric,
        "digests": taken.digests,
        "entries": taken.entries,
        "stored": taken.stored,
    }
    if mesh.speaks_for_stage:
        told["tensors"] = {key: tensor.to_dict() for key, tensor in own_part.tensors.items()}
        told["numbers"], told["groups"] = own_part.numbers, own_part.groups
    every: list[dict[str, Any]] = mesh.all_gather_object(told)
    index = StateIndex.of_layout(mesh.layout, taken.runtime.plan)
    index.step = own_part.step
    index.optimizer = own_part.optimizer
    index.carried = own_part.carried
    # If hfscale runs from a source tree, there is no package metadata.
    package = sys.modules["hfscale"]
    index.versions = {"hfscale": package.__version__, "torch": str(torch.__version__)}
    digests = taken.digests.items()
    index.others = {
        name: all(each["digests"].get(name) == digest for each in every) for name, digest in digests
    }
    of_batches = {each["batch"]: each["digests"] for each in every}
    index.shards = sorted(
        name
        for name in set[str]().union(*(each["numeric"] for each in every))
        if any(each["digests"].get(name) != of_batches[each["batch"]].get(name) for each in every)
    )
    for each in every:
        _merge(index, each)
    # A rank may have optimizer state that the first rank of its stage lacks.
    unheard = {
        key: own_part.tensors[key].to_dict() for key in taken.held if key not in index.tensors
    }
    for tensors in mesh.all_gather_object(unheard):
        _merge(index, {"tensors": tensors})
    _add_stored_names(index, taken.runtime, every)
    return index


def _add_stored_names(
    index: StateIndex,
    runtime: Runtime,
    every: list[dict[str, Any]],
) -> None:
    """Add the tensors' names in a Hugging Face checkpoint to the index, for a later conversion of the state."""
    if names := {key: name for each in every for key, name in each["stored"].items()}:
        index.adapter = True
        index.stored = names
        return
    staged = runtime.plan.stages is not None
    entries = in_order(
        runtime,
        [each["entries"] for each in (every if staged else every[:1])],
    )
    index.stored = {
        e.name: f"weights/{e.planned.name}" if e.planned else f"buffers/{e.name}" for e in entries
    }


def _merge(index: StateIndex, told: dict[str, Any]) -> None:
    """Add the entries that another rank has sent (``told``) to the index. Existing entries stay: if several pipeline
    stages have a tensor, the index keeps the entry of the first stage.
    """
    for key, tensor in told.get("tensors", {}).items():
        index.tensors.setdefault(key, StateTensor.from_dict(tensor))
    for name, numbers in told.get("numbers", {}).items():
        index.numbers.setdefault(name, numbers)
    if (groups := told.get("groups")) is not None:
        merged = index.groups if index.groups is not None else [[] for _ in groups]
        pairs = zip(merged, groups, strict=True)
        index.groups = [
            [
                *old,
                *(name for name in new if name not in set(old)),
            ]
            for old, new in pairs
        ]
