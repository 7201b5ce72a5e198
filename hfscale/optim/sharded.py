"""Define the optimizer of a training loop, over the model's own parameters, whose updates *steppers* compute.

Schedulers, Accelerate and ``zero_grad`` use ``param_groups`` with the model's parameters, DTensors or not. Each stepper
updates some of the parameters, on this rank's plain local tensors: DTensor dispatch would cost more than the update of
a small tensor, and bitsandbytes does not support DTensors. A step::

    param_groups[i] (lr, ...)  ---->  stepper's options of group i
    parameter, parameter.grad  ---->  local weight and gradient, the same memory; weights change in place
    state[parameter]           <--->  the stock optimizer's state during the step: plain tensors and numbers
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.mesh import Mesh
from ..distributed.ops.collectives import all_reduce
from ..errors import ConfigError
from ..plan import ParameterPlan
from ..plan.quantized import some_share_is_empty
from ..plan.state_tensor import StateTensor, like
from ..train.runtime.shards import local_tensor

Groups = Sequence[dict[str, Any]]
State = MutableMapping[Any, dict[str, Any]]
Piece = tuple[Tensor, tuple[str, ...]]  # a tensor, and the axes over which it is all-reduced


@dataclass(frozen=True, eq=False)
class Member:
    """Hold one parameter that an optimizer steps."""

    planned: ParameterPlan  # the parameter's entry in the plan
    parameter: nn.Parameter  # the model's own parameter
    group: int  # index of the parameter's group in ``param_groups``

    @property
    def weight(self) -> Tensor:
        """This rank's shard of the parameter as a plain tensor; may be empty."""
        if type(self.parameter) is nn.Parameter:  # a fast path: there may be hundreds of adapters
            return self.parameter.detach()
        # With autograd, to_local() of a DTensor would add a node to the graph.
        with torch.no_grad():
            return local_tensor(self.parameter).detach()

    @property
    def gradient(self) -> Tensor:
        """This rank's shard of the gradient as a plain tensor; an empty tensor if an empty shard has no gradient."""
        grad = self.parameter.grad
        if type(grad) is Tensor:
            return grad
        return self.weight if grad is None else local_tensor(grad)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which the parameter is sharded."""
        return tuple(cut.axis for cut in self.planned.cuts)


class Stepper:
    """Update some of an optimizer's parameters, ``members``, in place; subclasses define the rule."""

    def __init__(self, members: Sequence[Member], mesh: Mesh) -> None:
        self.members = members
        self._mesh = mesh

    def publish(self, state: State) -> None:
        """Write the optimizer state that exists before the first step into ``state``; do nothing by default."""

    def step(self, groups: Groups, state: State) -> None:
        """Make one update from the current gradients. Every rank of a pipeline stage makes the same calls."""
        raise NotImplementedError

    def state_layout(self, planned: ParameterPlan, key: str, shape: tuple[int, ...]) -> StateTensor:
        """Return how the state tensor ``key`` of a parameter is sharded, compared with the same tensor in one process.
        ``shape`` is the state tensor's shape, either on this rank or in full: any dims in front of the weight's dims
        are equal in both shapes.
        """
        return like(planned)


class ShardedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose update equals that of one process; made by :func:`hfscale.create_optimizer`.

    ``state`` holds plain tensors of this rank, so ``state_dict`` is the state of one rank; :func:`hfscale.save_state`
    writes the states of all ranks. The steppers together step every parameter of the groups exactly once.
    ``state_device`` is the device of the state, if it is not the device of the parameters.
    """

    keeps_plain_state = True  # read by the code that loads checkpoints

    def __init__(
        self,
        name: str,
        groups: Groups,
        defaults: dict[str, Any],
        steppers: Sequence[Stepper],
        state_device: torch.device | None = None,
    ) -> None:
        self.name = name
        self.state_device = state_device
        self._complete = False
        super().__init__(list(groups), defaults)
        self._steppers = tuple(steppers)
        self._stepper_of = {
            member.planned.name: stepper for stepper in steppers for member in stepper.members
        }
        self._complete = True
        for stepper in self._steppers:
            stepper.publish(self.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Make one update. Call it on every rank. If ``closure`` is given, call it first to recompute loss and
        gradients, and return its result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for stepper in self._steppers:
            stepper.step(self.param_groups, self.state)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group while the optimizer is being made. Later, raise :class:`ConfigError`, since the
        steppers are chosen once.
        """
        if self._complete:
            raise ConfigError(
                f"a parameter group cannot be added to {self.name!r} after its creation: set requires_grad of the new "
                "parameters first, and call hfscale.create_optimizer(model, ..., groups=[...]) again"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the :meth:`state_dict` of this rank, from a run with the same layout, without changing dtypes."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        places = [
            (parameter, group) for group in self.param_groups for parameter in group["params"]
        ]
        for number, (parameter, group) in zip(numbers, places, strict=True):
            if number in state_dict["state"]:
                values = state_dict["state"][number]
                self.state[parameter] = {
                    key: _on_its_device(value, group, self.state_device or parameter.device)
                    for key, value in values.items()
                }

    def state_layout(self, planned: ParameterPlan, key: str, shape: tuple[int, ...]) -> StateTensor:
        """Return how the state tensor ``key`` of a parameter is sharded; see :meth:`Stepper.state_layout`."""
        return self._stepper_of[planned.name].state_layout(planned, key, shape)


def _on_its_device(value: Any, group: dict[str, Any], device: torch.device) -> Any:
    """Return a state tensor on ``device``. Step counters stay on the CPU unless the optimizer needs counters on the
    device.
    """
    if not isinstance(value, Tensor) or (
        value.ndim == 0 and not (group.get("fused") or group.get("capturable"))
    ):
        return value
    return value.to(device)


def members_of(groups: Groups, plans: dict[int, ParameterPlan]) -> list[Member]:
    """Return a :class:`Member` (a parameter, its plan, the index of its group) for every parameter of ``groups``, in
    order. ``plans`` maps the ``id`` of a parameter to its plan.
    """
    return [
        Member(plans[id(parameter)], parameter, index)
        for index, group in enumerate(groups)
        for parameter in group["params"]
    ]


def stock_defaults(stock: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the default values of a stock class's options, except learning rate and weight decay."""
    options = signature(stock).parameters.values()
    return {
        option.name: option.default
        for option in options
        if option.name not in ("params", "lr", "weight_decay")
    }


def sum_over_ranks(pieces: Sequence[Piece], mesh: Mesh) -> list[Tensor]:
    """All-reduce each tensor over its own mesh axes, with one collective per axis for all tensors together. ``pieces``
    are pairs of a tensor and its axes.

    Every rank of a pipeline stage must pass pieces with the same axes in the same order; ranks of one process group
    must pass tensors of the same shapes. All ranks of a process group get bitwise equal results.
    """
    sums = [piece for piece, _ in pieces]
    for axis in sorted({axis for _, axes in pieces for axis in axes}):
        group = mesh.group(axis)
        if group is None:
            continue
        chosen = [index for index, (_, axes) in enumerate(pieces) if axis in axes]
        wide = (
            torch.float64
            if any(sums[index].dtype == torch.float64 for index in chosen)
            else torch.float32
        )
        flat = all_reduce(
            torch.cat([sums[index].reshape(-1).to(wide) for index in chosen]),
            group,
        )
        parts = flat.split([sums[index].numel() for index in chosen])
        for index, part in zip(chosen, parts, strict=True):
            sums[index] = part.view(sums[index].shape).to(sums[index].dtype)
    return sums


def gradients_present(members: Sequence[Member], mesh: Mesh) -> list[bool]:
    """Return, for each of the parameters ``members``, whether any rank that holds a shard of it has a gradient; all
    these ranks get the same answer. Only parameters with empty shards need communication: autograd may compute no
    gradient for an empty shard.
    """
    present = [member.parameter.grad is not None for member in members]
    doubtful = [
        index for index, member in enumerate(members) if some_share_is_empty(member.planned)
    ]
    if doubtful:
        flags = torch.tensor(
            [float(present[index]) for index in doubtful],
            device=mesh.device,
        )
        pieces = [
            (flag, members[index].axes)
            for index, flag in zip(doubtful, flags.unbind(), strict=True)
        ]
        for index, total in zip(
            doubtful, torch.stack(sum_over_ranks(pieces, mesh)).tolist(), strict=True
        ):
            present[index] = total > 0
    return present
