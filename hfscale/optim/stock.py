"""Steps with a stock optimizer class, of torch or bitsandbytes, on plain tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..cost.model.optimizer_bytes import BLOCK
from ..distributed.mesh import Mesh
from ..plan import ParameterPlan
from ..plan.state_tensor import StateTensor, like, scales, whole
from ..train.runtime.shards import gather_full
from .sharded import Groups, Member, State
from .sums import gradients_present

_SCALES, _TABLES = "absmax", "qmap"  # keys of bitsandbytes' 8-bit states

Stock = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes the stock optimizer over parameter groups."""


class StockOverStandIns:
    """A stock optimizer over placeholder parameters, which get memory, gradient and state for one step."""

    def __init__(
        self,
        stock: Stock,
        members: Sequence[Member],
        groups: Groups,
        copied: Callable[[Tensor], Tensor] = lambda weight: weight,
    ) -> None:
        """Make the optimizer; ``copied`` copies a weight if the optimizer steps a copy."""
        self.pairs = [(member, nn.Parameter(copied(member.weight))) for member in members]
        mine = [
            {**group, "params": [stand_in for member, stand_in in self.pairs if member.group == index]}
            for index, group in enumerate(groups)
        ]
        self.optimizer = stock(mine)

    def step(self, groups: Groups, state: State, tensors: Callable[[Member], tuple[Tensor, Tensor | None]]) -> None:
        """Make one step on the weight and gradient that ``tensors`` returns for a member; none without a gradient."""
        for mine, group in zip(self.optimizer.param_groups, groups, strict=True):
            mine.update({key: value for key, value in group.items() if key != "params"})
        scattered = []
        for member, stand_in in self.pairs:
            weight, gradient = tensors(member)
            if not weight.is_contiguous():  # bitsandbytes would update a copy and leave the weight unchanged
                scattered.append((weight, stand_in))
            stand_in.data = weight.contiguous()
            stand_in.grad = gradient
            if member.parameter in state:
                self.optimizer.state[stand_in] = state[member.parameter]
        self.optimizer.step()
        for weight, stand_in in scattered:
            weight.copy_(stand_in)
        for _, stand_in in self.pairs:
            stand_in.grad = None
        self.publish(state)

    def publish(self, state: State) -> None:
        """Move the optimizer's state into ``state``, keyed by the model's own parameters."""
        for member, stand_in in self.pairs:
            if stand_in in self.optimizer.state:
                state[member.parameter] = self.optimizer.state.pop(stand_in)

    def release(self) -> None:
        """Drop the placeholders' memory between steps."""
        for _, stand_in in self.pairs:
            stand_in.data = stand_in.data.new_empty(0)


class LocalStepper:
    """A stepper of shards in place, for elementwise optimizers, and blockwise ones if shards are whole blocks."""

    def __init__(self, stock: Stock, members: Sequence[Member], groups: Groups) -> None:
        self._inner = StockOverStandIns(stock, members, groups)

    def publish(self, state: State) -> None:
        """Publish the state that exists before the first step."""
        self._inner.publish(state)

    def members(self) -> Sequence[Member]:
        """Return the parameters this stepper updates."""
        return [member for member, _ in self._inner.pairs]

    def lies(self, planned: ParameterPlan, key: str, shape: tuple[int, ...]) -> StateTensor:
        """Return the state layout, see :meth:`Stepper.lies`: sharded like the parameter, or scales of its blocks."""
        if not shape or key.startswith(_TABLES):
            return whole(*shape)
        if key.startswith(_SCALES):
            return scales(planned, BLOCK, *shape[:-1])
        return like(planned, *shape[: len(shape) - len(planned.shape)])

    def step(self, groups: Groups, state: State) -> None:
        """Make one update; no communication."""
        self._inner.step(groups, state, _here)


def _here(member: Member) -> tuple[Tensor, Tensor | None]:
    weight, grad = member.weight, member.parameter.grad
    return weight, None if grad is None or not weight.numel() else member.gradient


class WholeStepper:
    """A stepper of full parameters: every rank that holds a shard of one gathers it, one parameter at a time.

    Weight and gradient are gathered over the ranks of the parameter's cuts; all of them make the same update of the
    same full tensor, and each copies its shard back. The state is full on every rank.
    """

    def __init__(
        self,
        stock: Stock,
        members: Sequence[Member],
        groups: Groups,
        mesh: Mesh,
        copied: Callable[[Tensor], Tensor] = lambda weight: weight,
    ) -> None:
        self._members, self._mesh = members, mesh
        self._inners = [StockOverStandIns(stock, [member], groups, copied) for member in members]
        for inner in self._inners:
            inner.release()

    def publish(self, state: State) -> None:
        """Publish the state that exists before the first step."""
        for inner in self._inners:
            inner.publish(state)

    def members(self) -> Sequence[Member]:
        """Return the parameters this stepper updates."""
        return self._members

    def lies(self, planned: ParameterPlan, key: str, shape: tuple[int, ...]) -> StateTensor:
        """Return the state layout, see :meth:`Stepper.lies`: full on every rank."""
        if not shape or key.startswith(_TABLES):
            return whole(*shape)
        if key.startswith(_SCALES):
            return scales(planned, BLOCK, *shape[:-1], whole=True)
        return whole(*shape[: len(shape) - len(planned.shape)], *planned.shape)

    def step(self, groups: Groups, state: State) -> None:
        """Make one update; communicates over the axes of each parameter's cuts."""
        present = gradients_present(self._members, self._mesh)
        for member, inner, with_gradient in zip(self._members, self._inners, present, strict=True):
            if with_gradient:
                self._step_one(member, inner, groups, state)

    def _step_one(self, member: Member, inner: StockOverStandIns, groups: Groups, state: State) -> None:
        planned, share = member.planned, member.weight
        weight, gradient = (
            gather_full(tensor, planned.shape, planned.cuts, self._mesh) for tensor in (share, member.gradient)
        )
        inner.step(groups, state, lambda _: (weight, gradient))
        share.copy_(planned.take(weight, self._mesh.ranks))
        inner.release()
