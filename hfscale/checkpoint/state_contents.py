"""The contents of a run's state on this rank: tensors, their layouts, and the optimizer's numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..distributed.mesh import Mesh
from ..errors import CheckpointError
from ..plan import ParameterPlan
from ..plan.state_tensor import StateTensor, like, own, whole
from ..train.runtime import Runtime
from ..train.runtime.shards import local_tensor
from .state_index import writers


@dataclass
class StateContents:
    """This rank's contents of a state.

    Attributes:
        tensors: key -> layout, of every tensor of this rank's stage.
        held: key -> shard that this rank writes.
        numbers: name of a parameter -> its optimizer state besides tensors.
        groups: names of the parameters in each of the optimizer's groups.
        optimizer: the result of :func:`described`.
        options: the options of these groups.
    """

    tensors: dict[str, StateTensor] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[list[str]] | None = None
    optimizer: list[Any] | None = None
    options: list[dict[str, Any]] = field(default_factory=list)

    def add(self, key: str, tensor: StateTensor, share: Tensor, mesh: Mesh) -> None:
        """Add a tensor of which this rank has ``share``; it writes it if it is the first rank that has it."""
        self.tensors[key] = tensor
        if not tensor.own and tuple(share.shape) != (shape := tensor.local_shape(mesh.ranks)):
            raise CheckpointError(
                f"{key} must have the shape {shape} on this rank, got {tuple(share.shape)}: do not replace "
                "parameters after the model was made"
            )
        _, ranks = mesh.view(tensor.cuts)
        cut = {cut.axis: holders for cut, holders in zip(tensor.cuts, writers(tensor), strict=True)}
        if ranks["pp"] == tensor.home and all(
            rank in cut[axis] if axis in cut else rank == 0 for axis, rank in ranks.items() if axis != "pp"
        ):
            self.held[key] = share


@torch.no_grad()  # with autograd, to_local() of DTensors took a third of the time
def contents_of(runtime: Runtime, optimizer: torch.optim.Optimizer | None) -> StateContents:
    """Collect the tensors to write of a model and its optimizer, without copies."""
    found, mesh = StateContents(), runtime.mesh
    for planned, parameter in written_parameters(runtime):
        home = runtime.plan.primary_rank(planned.name)
        found.add(f"weights/{planned.name}", replace(like(planned), home=home), local_tensor(parameter).detach(), mesh)
    for name, buffer in runtime.model.named_buffers():
        found.add(f"buffers/{name}", replace(whole(*buffer.shape), home=mesh.pp_rank), buffer, mesh)
    if optimizer is not None:
        _add_optimizer(found, runtime, optimizer)
    return found


def written_parameters(runtime: Runtime) -> list[tuple[ParameterPlan, Tensor]]:
    """Return the parameters to write, without frozen weights in 4 or 8 bits: those are loaded from the checkpoint."""
    frozen = runtime.plan.quantized.weights if runtime.plan.quantized is not None else ()
    return [(planned, parameter) for planned, parameter in runtime.parameters() if planned.name not in frozen]


def _add_optimizer(found: StateContents, runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    plans = {id(parameter): planned for planned, parameter in written_parameters(runtime)}
    given = moved_parameters(optimizer)
    strange = {id(parameter) for group in given for parameter in group} - plans.keys()
    if strange:
        raise CheckpointError(
            f"the optimizer has {len(strange)} parameters that are not the model's: keep them in an optimizer of their "
            "own, and pass it to save_state under a name"
        )
    for parameter, values in optimizer.state.items():
        planned = plans.get(id(parameter))
        if planned is None:  # frozen, in 4 or 8 bits; Adagrad has state for all parameters from the beginning
            continue
        home = runtime.plan.primary_rank(planned.name)
        share = tuple(local_tensor(parameter).shape)
        for key, value in values.items():
            if isinstance(value, Tensor):
                held = local_tensor(value).detach()
                lies = state_lies(optimizer, planned, key, tuple(held.shape), share)
                found.add(f"optimizer/{key}/{planned.name}", replace(lies, home=home), held, runtime.mesh)
            elif value is None or isinstance(value, bool | int | float | str):
                found.numbers.setdefault(planned.name, {})[key] = value
            else:
                raise CheckpointError(
                    f"the optimizer keeps a {type(value).__name__} as {key!r} of {planned.name}, which is neither a "
                    "tensor nor a number: save its state yourself, and pass it to save_state under a name"
                )
    found.groups = [[plans[id(parameter)].name for parameter in group] for group in given]
    found.optimizer = described(optimizer)
    found.options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def described(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return an optimizer's name and the names of its options: equal options go with equal states."""
    return [str(getattr(optimizer, "name", type(optimizer).__name__)), sorted(optimizer.defaults)]


def moved_parameters(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return each group's parameters that the optimizer may update, without frozen weights in 4 or 8 bits."""
    return [
        [parameter for parameter in group["params"] if parameter.is_floating_point() or parameter.requires_grad]
        for group in optimizer.param_groups
    ]


def state_lies(
    optimizer: torch.optim.Optimizer,
    planned: ParameterPlan,
    key: str,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
) -> StateTensor:
    """Return how a tensor of an optimizer's state is sharded, relative to that of one process.

    Args:
        shape: the tensor's: this rank's shard, together with the weight's; or the full one, with the full weight's.
        weight: the shape of the weight's shard, or of the full weight.
    """
    if getattr(optimizer, "lies", None) is not None:
        told: Any = optimizer
        found: StateTensor = told.lies(planned, key, shape)
        return found
    if not shape or not planned.cuts:
        return whole(*shape)
    # In bitsandbytes' own optimizers over shards, the shard's size decides which state has 8 bits.
    if shape == weight and not type(optimizer).__module__.startswith("bitsandbytes"):
        return like(planned)
    return own(planned)


def parameters_of_state(tensors: dict[str, StateTensor]) -> Iterator[tuple[str, str, str]]:
    """Yield for each optimizer tensor: the key in the index, the name of the parameter, and the optimizer's key."""
    for key in tensors:
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            state, _, name = rest.partition("/")
            yield key, name, state
