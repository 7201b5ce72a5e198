"""Optimizer steps on copies of weights, one parameter at a time: on the CPU (offload), or in float32 for stochastic
rounding.

::

    weight, gradient --copy--> CPU and / or float32 --stock optimizer--> copy --written back, rounded--> weight
                                                          |
                                                        state   stays where the copies were

Besides the state no memory is kept: at most one copy of the largest shard of a parameter, and of its gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.mesh import Mesh
from ..plan import ParameterPlan
from ..plan.state_tensor import StateTensor
from ..train.runtime.shards import gather_full
from .rounding import key_of, places_of, write_rounded
from .sharded import Groups, Member, State
from .stock import LocalStepper, Stock, StockOverStandIns, WholeStepper
from .sums import gradients_present

UPDATES = "updates"
"""Key of a parameter group that counts updates, so that a resumed run continues the rounding's random numbers."""


@dataclass(frozen=True)
class Aside:
    """Where copies are stepped, and how results are written back.

    Attributes:
        device: device of the copies.
        seed: seed of the stochastic rounding of bfloat16 weights; ``None``: copies keep the weight's dtype.
    """

    device: torch.device
    seed: int | None = None

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a weight or gradient for the optimizer, in float32 if the weight is to be rounded."""
        wide = self.seed is not None and tensor.dtype == torch.bfloat16
        return tensor.to(self.device, torch.float32 if wide else tensor.dtype, copy=True)

    def write(self, member: Member, stepped: Tensor, mesh: Mesh, update: int) -> None:
        """Write this rank's updated shard ``stepped`` into the member's weight."""
        share = member.weight
        if self.seed is None or share.dtype != torch.bfloat16:
            share.copy_(stepped)
            return
        places = places_of(member.planned, mesh.ranks, share.device)
        write_rounded(share, stepped.to(share.device), places, key_of(self.seed, update, member.planned.name))


class AsideStepper(LocalStepper):
    """A stepper of copies of shards, for elementwise optimizers, and blockwise ones if shards are whole blocks."""

    def __init__(self, stock: Stock, members: Sequence[Member], groups: Groups, mesh: Mesh, aside: Aside) -> None:
        self._members, self._mesh, self._aside = members, mesh, aside
        self._inners = [StockOverStandIns(stock, [member], groups, aside.copy) for member in members]
        for inner in self._inners:
            inner.release()
            optimizer: Any = inner.optimizer
            if hasattr(optimizer, "name2qmap"):  # share bitsandbytes' tables of 8-bit values
                first: Any = self._inners[0].optimizer
                optimizer.name2qmap = first.name2qmap

    def publish(self, state: State) -> None:
        """Publish the state that exists before the first step."""
        for inner in self._inners:
            inner.publish(state)

    def members(self) -> Sequence[Member]:
        """Return the parameters this stepper updates."""
        return self._members

    def step(self, groups: Groups, state: State) -> None:
        """Make one update; no communication."""
        for member, inner in zip(self._members, self._inners, strict=True):
            if member.parameter.grad is None or not member.weight.numel():
                continue
            weight, gradient = self._aside.copy(member.weight), self._aside.copy(member.gradient)
            inner.step(groups, state, lambda _, pair=(weight, gradient): pair)  # type: ignore[misc]
            self._aside.write(member, weight, self._mesh, groups[member.group].get(UPDATES, 0))
            inner.release()


class WholeAsideStepper(WholeStepper):
    """A stepper of copies of full parameters, gathered one at a time."""

    def __init__(self, stock: Stock, members: Sequence[Member], groups: Groups, mesh: Mesh, aside: Aside) -> None:
        self._aside = aside
        super().__init__(stock, members, groups, mesh, aside.copy)

    def step(self, groups: Groups, state: State) -> None:
        """Make one update; communicates over the axes of each parameter's cuts."""
        present = gradients_present(self._members, self._mesh)
        for member, inner, with_gradient in zip(self._members, self._inners, present, strict=True):
            if not with_gradient:
                continue
            planned = member.planned
            weight, gradient = (
                self._aside.copy(gather_full(tensor, planned.shape, planned.cuts, self._mesh))
                for tensor in (member.weight, member.gradient)
            )
            inner.step(groups, state, lambda _, pair=(weight, gradient): pair)  # type: ignore[misc]
            share = planned.take(weight, self._mesh.ranks)
            self._aside.write(member, share, self._mesh, groups[member.group].get(UPDATES, 0))
            inner.release()


class CountUpdates:
    """A stepper that only counts updates, after the steppers that read the number."""

    def publish(self, state: State) -> None:
        """Publish nothing: it has no state."""

    def members(self) -> Sequence[Member]:
        """Return no parameters."""
        return ()

    def lies(self, planned: ParameterPlan, key: str, shape: tuple[int, ...]) -> StateTensor:
        """Raise NotImplementedError: it has no state."""
        raise NotImplementedError

    def step(self, groups: Groups, state: State) -> None:
        """Count one update."""
        for group in groups:
            group[UPDATES] = group.get(UPDATES, 0) + 1
