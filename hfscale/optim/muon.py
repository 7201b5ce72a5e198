"""Muon (Jordan et al. 2024) over shards, as in ``torch.optim.Muon``: momentum, then the nearest orthogonal matrix.

Momentum is elementwise and kept sharded like the gradient. The update must be orthogonal as a full matrix, so it is
gathered over the ranks of the parameter's cuts, in bfloat16; each of them orthogonalizes it and applies its shard.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..plan import ParameterPlan
from ..train.runtime.shards import gather_full
from .sharded import Groups, State, Stepper, gradients_present

_EPS = 1e-7
DEFAULTS: dict[str, Any] = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
ADJUSTMENTS = {
    None: lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""``adjust_lr_fn`` -> factor on the learning rate of a matrix."""


def is_hidden_matrix(planned: ParameterPlan, owners: Sequence[nn.Module], layers: Sequence[str]) -> bool:
    """Return whether a parameter is a matrix of a layer: not an embedding, head, stack of experts or vector."""
    if len(planned.shape) != 2 or any(isinstance(owner, nn.Embedding) for owner in owners):
        return False
    return any(planned.name.startswith(f"{layer}.") for layer in layers)


class MuonStepper(Stepper):
    """A stepper that updates ``members``, which are matrices, by Muon."""

    def step(self, groups: Groups, state: State) -> None:
        """Make one update; communicates over the axes of the parameters' cuts."""
        present = gradients_present(self.members, self._mesh)
        for member, with_gradient in zip(self.members, present, strict=True):
            if not with_gradient:
                continue
            planned, weight, grad, group = member.planned, member.weight, member.gradient, groups[member.group]
            average = state.setdefault(member.parameter, {}).setdefault("momentum_buffer", torch.zeros_like(grad))
            average.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(average, group["momentum"]) if group["nesterov"] else average
            whole = gather_full(update.to(torch.bfloat16, copy=True), planned.shape, planned.cuts, self._mesh)
            orthogonal = orthogonalized(whole, group["ns_coefficients"], group["ns_steps"])
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            ratio = ADJUSTMENTS[group["adjust_lr_fn"]](*planned.shape)
            weight.add_(planned.take(orthogonal, self._mesh.ranks), alpha=-group["lr"] * ratio)


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Approximate ``U V^T`` of a matrix's singular value decomposition by quintic Newton-Schulz iterations."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x.div(x.norm().clamp(min=_EPS))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
