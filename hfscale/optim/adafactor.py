"""Run Adafactor (Shazeer & Stern 2018) over shards, with the arithmetic of ``transformers.optimization.Adafactor``.

Adafactor keeps row and column means of a matrix's squared gradients. For a sharded matrix these means, and the two
norms that scale an update, need sums over ranks; everything else is elementwise. A step has four stages. Each of
the first three stages ends with one all-reduce for all parameters together: of vectors after stage 1, and of scalars
after stages 2 and 3::

    1  squares   -> sums of rows and of columns; of squared weights, if these scale the step
    2  averages  -> the mean of the rows' averages
    3  update    -> its norm
    4  update, recomputed, clipped, scaled, applied: recomputed so that updates of all parameters are never held at once

``[..., R, C]`` is the full parameter, ``[..., r, c]`` a shard. Leading dims index separate matrices (experts), but the
norms are those of the full parameter.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers.optimization import Adafactor

from ..distributed.mesh import Mesh
from ..plan import ParameterPlan
from ..plan.state_tensor import StateTensor, like, whole, without_dim
from .sharded import (
    Groups,
    Member,
    Piece,
    State,
    Stepper,
    gradients_present,
    stock_defaults,
    sum_over_ranks,
)

DEFAULTS: dict[str, Any] = stock_defaults(Adafactor)
"""The stock class's defaults; HF Trainer sets ``scale_parameter`` and ``relative_step`` to ``False``."""

_NARROW = (torch.float16, torch.bfloat16)
# Name of a state tensor of mean squares -> the dim over which it is averaged.
_FACTORS = {
    "exp_avg_sq_row": -1,
    "exp_avg_sq_col": -2,
}


class AdafactorStepper(Stepper):
    """Update the parameters ``members`` by Adafactor."""

    def state_layout(self, planned: ParameterPlan, key: str, shape: tuple[int, ...]) -> StateTensor:
        """Return how a state tensor is sharded: row and column means like the weight without the averaged dim, scalars
        equal on all ranks; see :meth:`Stepper.state_layout`.
        """
        if key in _FACTORS:
            return without_dim(planned, _FACTORS[key])
        return like(planned) if shape else whole()

    def step(self, groups: Groups, state: State) -> None:
        """Make one update, with all-reduces over the mesh axes over which the parameters are sharded."""
        present = gradients_present(self.members, self._mesh)
        updates = [
            _Update(
                member, groups[member.group], state.setdefault(member.parameter, {}), self._mesh
            )
            for member, with_gradient in zip(self.members, present, strict=True)
            if with_gradient
        ]
        for stage in (_Update.squares, _Update.averages, _Update.norm):
            pieces = [
                (update, name, piece) for update in updates for name, piece in stage(update).items()
            ]
            sums = sum_over_ranks([piece for *_, piece in pieces], self._mesh)
            for (update, name, _), total in zip(pieces, sums, strict=True):
                update.sums[name] = total
        for update in updates:
            update.apply()


class _Update:
    """Compute the update of one parameter in stages, between which tensors are all-reduced. ``sums`` holds the results
    of these all-reduces, by name.
    """

    def __init__(
        self,
        member: Member,
        group: dict[str, Any],
        state: dict[str, Any],
        mesh: Mesh,
    ) -> None:
        self.group, self.state, self.sums = group, state, dict[str, Tensor]()
        self.shape = member.planned.shape
        self.axes = member.axes
        self.weight = member.weight
        self.raw = member.gradient
        self.factored = len(self.shape) >= 2
        self.counted = member.planned.counted(mesh.ranks)
        cuts = member.planned.cuts
        self.along = [
            tuple(cut.axis for cut in cuts if cut.dim == dim) for dim in range(len(self.shape))
        ]
        if not state:
            grad = self.gradient
            state["step"] = 0
            if group["beta1"] is not None:
                state["exp_avg"] = torch.zeros_like(grad)
            if self.factored:
                state["exp_avg_sq_row"] = grad.new_zeros(grad.shape[:-1])
                state["exp_avg_sq_col"] = grad.new_zeros((*grad.shape[:-2], grad.shape[-1]))
            else:
                state["exp_avg_sq"] = torch.zeros_like(grad)
        state["step"] += 1

    @property
    def gradient(self) -> Tensor:
        return self.raw.float() if self.raw.dtype in _NARROW else self.raw

    @property
    def beta2(self) -> float:
        return 1.0 - math.pow(self.state["step"], self.group["decay_rate"])

    def squares(self) -> dict[str, Piece]:
        pieces: dict[str, Piece] = {}
        if self.group["scale_parameter"]:
            weight = self.weight.float() if self.weight.dtype in _NARROW else self.weight
            pieces["weight"] = (self._everything(weight), self.axes)
        squares = self.gradient.square().add_(self.group["eps"][0])
        if not self.factored:
            self.state["exp_avg_sq"].mul_(self.beta2).add_(squares, alpha=1.0 - self.beta2)
            return pieces
        rows = len(self.shape) - 2
        columns = len(self.shape) - 1
        pieces["rows"] = (
            self._without_replicas(squares, columns).sum(columns),
            self.along[columns],
        )
        pieces["columns"] = (
            self._without_replicas(squares, rows).sum(rows),
            self.along[rows],
        )
        return pieces

    def averages(self) -> dict[str, Piece]:
        if "weight" in self.sums:
            self.state["RMS"] = (self.sums["weight"] / math.prod(self.shape)).sqrt()
        if not self.factored:
            return {}
        row = self.state["exp_avg_sq_row"]
        col = self.state["exp_avg_sq_col"]
        row.mul_(self.beta2).add_(
            self.sums["rows"] / self.shape[-1],
            alpha=1.0 - self.beta2,
        )
        col.mul_(self.beta2).add_(
            self.sums["columns"] / self.shape[-2],
            alpha=1.0 - self.beta2,
        )
        rows = len(self.shape) - 2
        return {
            "average": (
                self._without_replicas(row, rows).sum(-1, keepdim=True),
                self.along[rows],
            )
        }

    def norm(self) -> dict[str, Piece]:
        return {"update": (self._everything(self._raw_update()), self.axes)}

    def apply(self) -> None:
        group = self.group
        state = self.state
        update = self._raw_update()
        size = (self.sums["update"] / math.prod(self.shape)).sqrt()
        lr: Any = group["lr"]
        if group["relative_step"]:
            lr = min(
                1e-6 * state["step"] if group["warmup_init"] else 1e-2,
                1.0 / math.sqrt(state["step"]),
            )
        if group["scale_parameter"]:
            lr = state["RMS"].clamp(min=group["eps"][1]) * lr
        update.mul_(lr / (size / group["clip_threshold"]).clamp(min=1.0))
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1.0 - group["beta1"])
        wide = self.weight.float() if self.weight.dtype in _NARROW else self.weight
        if group["weight_decay"] != 0:
            wide.sub_(wide * (group["weight_decay"] * lr))
        wide.sub_(update)
        if wide is not self.weight:
            self.weight.copy_(wide)

    def _raw_update(self) -> Tensor:
        if not self.factored:
            return self.state["exp_avg_sq"].rsqrt().mul_(self.gradient)
        row = self.state["exp_avg_sq_row"]
        col = self.state["exp_avg_sq_col"]
        mean = self.sums["average"] / self.shape[-2]
        return (
            (row / mean).rsqrt_().unsqueeze(-1).mul(col.rsqrt().unsqueeze(-2)).mul_(self.gradient)
        )

    def _everything(self, tensor: Tensor) -> Tensor:
        """Return the sum of squares of a shard's entries, without entries that a lower rank holds, too."""
        counted = (
            tensor if self.counted is None else self._without_replicas(tensor, self.counted[0])
        )
        return counted.square().sum()

    def _without_replicas(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensor without entries along ``dim`` that a lower rank holds, too, so that sums over ranks count
        each entry once.
        """
        if self.counted is None or self.counted[0] != dim:
            return tensor
        pieces = [tensor.narrow(dim, start, stop - start) for start, stop in self.counted[1]]
        return torch.cat(pieces, dim) if pieces else tensor.narrow(dim, 0, 0)
