"""What is attached to a parallelized model: its plan and its mesh, found again from whatever wraps it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._host.transformers.classes import class_name
from ..errors import ConfigError
from ..mesh import Mesh
from ..plan import ParameterPlan, Plan
from .names import stock_name

_ATTRIBUTE = "_hfscale"


@dataclass
class Runtime:
    """The live state of one parallelized model.

    Attributes:
        model: the stock model itself, whatever wraps it now.
        plan: what became of its parameters.
        mesh: the ranks.
        loss: the loss over the cut vocabulary; ``None`` where the model keeps its own loss.
        sums: sums partial gradients over the tensor ranks; ``None`` where there is one.
        streams: what sequence parallelism cuts along the sequence.
        pipeline: runs the model's stages; ``None`` where there is one.
        routing: what routes tokens, counts them and balances experts; ``None`` where there are none, or stock ones.
        mixed_precision: what its forward pass computes in.
        adapters: what PEFT put around its modules; ``None`` where nothing.
        options: how the routing of experts was asked for.
        undo: takes out of the model what makes it compute with other ranks; see :mod:`hfscale.runtime.snapshot`.
        random_streams_agreed: whether the tensor ranks have agreed on the stream that dropout draws from.
        first_batch: the hook that compares the first batch of a plain loop; ``None`` where no ranks share one.
        tied_gradients: which tensors that several stages hold get a gradient, once a step has shown it.
        steps: how many training steps have begun.
    """

    model: Any
    plan: Plan
    mesh: Mesh
    loss: Any = None
    sums: Any = None
    streams: list[Any] = field(default_factory=list)
    pipeline: Any = None
    routing: Any = None
    mixed_precision: str = "no"
    adapters: Any = None
    options: Any = None
    undo: Callable[[], None] | None = None
    random_streams_agreed: bool = False
    first_batch: Any = None
    tied_gradients: dict[Any, list[bool]] = field(default_factory=dict)
    steps: int = 0
    _stream_of: dict[str, Any] = field(default_factory=dict)

    def attach(self) -> None:
        """Make this runtime findable from the model."""
        setattr(self.model, _ATTRIBUTE, self)

    def parameters(self) -> list[tuple[ParameterPlan, Tensor]]:
        """Every owned parameter that this rank holds with its plan, in the plan's order."""
        here: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        live = {**{stock_name(name): parameter for name, parameter in here.items()}, **here}
        held = self.plan.held(self.mesh.ranks["pp"])
        return [(planned, live[held[planned.name]]) for planned in self.plan.owned() if planned.name in held]

    def unplanned_parameters(self) -> list[str]:
        """Parameters that train and that the plan does not know: put into the model by others since."""
        trains = (name for name, parameter in self.model.named_parameters() if parameter.requires_grad)
        known = self.plan.by_name
        return [name for name in trains if name not in known and stock_name(name) not in known]

    def counts(self, planned: ParameterPlan) -> bool:
        """Whether this rank's stage is the one that counts an owned parameter; others may hold a copy."""
        return self.plan.home(planned.name) == self.mesh.ranks["pp"]

    def is_local(self, name: str) -> bool:
        """Whether this rank has a parameter or module of the layers, or of what is around them on one stage only."""
        return self.plan.is_local(self.mesh.ranks["pp"], name)

    def sequence_region_of(self, name: str) -> Any:
        """The stream that a module in the layers reads and writes, where sequence parallelism cuts it."""
        if name not in self._stream_of:  # layers ask in every pass
            inside = (s for s in self.streams if any(f"{name}.".startswith(f"{layer}.") for layer in s.plan.layers))
            self._stream_of[name] = next(inside, None)
        return self._stream_of[name]


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a model that hfscale parallelized, seen through any wrapper.

    Raises:
        ConfigError: hfscale has not parallelized it.
    """
    found = find_runtime(model)
    if found is None:
        raise ConfigError(
            f"{class_name(model)} was not parallelized by hfscale: build it with hfscale.from_pretrained or "
            "hfscale.from_config, or pass it through hfscale.parallelize"
        )
    return found


def find_runtime(model: nn.Module) -> Runtime | None:
    """Like :func:`runtime_of`, ``None`` where there is none."""
    for module in model.modules():
        if _ATTRIBUTE in module.__dict__:
            found: Runtime = module.__dict__[_ATTRIBUTE]
            return found
    return None


def recomputing() -> bool:
    """Whether this forward pass is activation checkpointing's second one, inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor this rank holds of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_sharded(share: Tensor, other: Tensor) -> Tensor:
    """This rank's ``share`` as a tensor sharded as ``other`` is; the share itself where that is not sharded."""
    if not isinstance(other, DTensor):
        return share
    mesh, placements = other.device_mesh, other.placements
    return DTensor.from_local(share, mesh, placements, run_check=False, shape=other.shape, stride=other.stride())
