"""Compute the global norm of gradients that are sharded over ranks, clip gradients by this norm, and skip the steps
whose norm or loss is NaN or infinite. All ranks skip the same steps; too many skipped steps in a row raise an error.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._compat.torch import alike, multiply_all, norms_of
from ..errors import HFScaleError, check_count, check_number
from ..plan import ParameterPlan
from .runtime import Runtime, local_tensor, runtime_of

_Axes = tuple[str, ...]
_Gradient = tuple[ParameterPlan, Tensor]


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients so that their global norm is at most ``max_norm``; return the norm before scaling.

    The norm is that of the full model, although gradients are sharded over ranks; it is the same scalar on every rank.
    The formula is that of ``torch.nn.utils.clip_grad_norm_``.

    Raises:
        ConfigError: ``max_norm`` is below 0, ``norm_type`` is not above 0, or one of the two is not a number.
    """
    runtime = runtime_of(model)
    if not isinstance(max_norm, Tensor):
        check_number("max_norm", max_norm, least=0, infinite=True)
    check_number("norm_type", norm_type, above=0, infinite=True)
    here = [
        (planned, local_tensor(p.grad)) for planned, p in runtime.parameters() if p.grad is not None
    ]
    if model is not runtime.model:
        from .around import refuse_trained_around

        refuse_trained_around(runtime, model)
    norm = _global_norm(runtime, here, float(norm_type))
    gradients = [gradient for _, gradient in here]
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for same, _ in alike(gradients):
        multiply_all(same, coefficient)
    return norm


def _global_norm(runtime: Runtime, here: list[_Gradient], norm_type: float) -> Tensor:
    """All-reduce the norms of this rank's gradients ``here`` over the mesh axes that shard their parameters, and then
    over pipeline stages; return the global norm.
    """
    mesh = runtime.mesh
    infinite = norm_type == float("inf")
    operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    total: Tensor | None = None
    by_axes = _counted_by_axes(runtime, here)
    types = {gradient.dtype for _, gradient in here}
    if (
        mesh.layout.total_size > 1
    ):  # use one dtype on every rank, even on ranks that hold no gradient
        types |= {planned.dtype for planned in runtime.plan.owned()}
    wide = torch.float64 if torch.float64 in types else torch.float32
    for axes, gradients in sorted(by_axes.items()):  # the same order of collectives on every rank
        part = _joined_norm(gradients, norm_type, wide, mesh.device)
        for group in mesh.groups(*axes):
            dist.all_reduce(part, op=operation, group=group)
        total = part if total is None else torch.maximum(total, part) if infinite else total + part
    assert total is not None  # every model has parameters
    for group in mesh.groups("pp"):
        total = total.double()
        dist.all_reduce(total, op=operation, group=group)
        total = total.to(wide)
    return total if infinite else total.pow(1.0 / norm_type)


def _counted_by_axes(runtime: Runtime, here: list[_Gradient]) -> dict[_Axes, list[Tensor]]:
    """Group gradients by the mesh axes that shard their parameter. Of entries that several ranks hold, only one rank
    includes its copy, so that the global norm contains each entry once.
    """
    axes = {
        planned.name: tuple(cut.axis for cut in planned.cuts) for planned in runtime.plan.owned()
    }
    by_axes: dict[_Axes, list[Tensor]] = {axis_names: [] for axis_names in axes.values()}
    for planned, gradient in here:
        if runtime.counts(planned):
            # Count only the slices that no lower rank holds, too.
            counted = planned.counted(runtime.mesh.ranks)
            dim, spans = counted or (0, ())
            slices = [gradient.narrow(dim, start, stop - start) for start, stop in spans]
            by_axes[axes[planned.name]] += [gradient] if counted is None else slices
    return by_axes


def _joined_norm(
    grads: list[Tensor], norm_type: float, wide: torch.dtype, device: torch.device
) -> Tensor:
    """Return the sum of the ``norm_type``-th powers of the gradients' norms, or for the infinity norm the largest norm,
    as a scalar of dtype ``wide``.
    """
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=wide, device=device)
    norms: dict[int, Tensor] = {}
    for same, places in alike(grads):
        norms.update(zip(places, norms_of(same, norm_type, wide), strict=True))
    norms_of_rank = torch.stack([norms[i] for i in range(len(grads))]).to(device)
    return norms_of_rank.max() if norm_type == float("inf") else norms_of_rank.pow(norm_type).sum()


class BadStepError(HFScaleError, RuntimeError):
    """Raised if the loss or the gradient norm was NaN or infinite in too many steps in a row."""


@dataclass
class BadSteps:
    """Decide whether the optimizer may step: not if the loss or the gradient norm is NaN or infinite. Count the skipped
    steps::

        bad = hfscale.BadSteps(limit=10)
        loss = hfscale.train_step(model, batch)
        norm = hfscale.clip_grad_norm_(model, 1.0)
        if bad.may_step(loss, norm):
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    Loss and norm are those of the whole step and the full model, equal on every rank, so all ranks make the same
    decision without communication. The counts can be saved with :func:`hfscale.save_state`.

    Attributes:
        limit: number of skipped steps in a row at which an error is raised.
        skipped: number of steps skipped so far.
        in_a_row: number of steps skipped since the last step that was not skipped.
    """

    limit: int = 10
    skipped: int = field(default=0, init=False)
    in_a_row: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_count("limit", self.limit)

    def may_step(self, loss: Tensor | float, norm: Tensor | float) -> bool:
        """Return whether loss and norm are finite, so that the optimizer may step. Otherwise count a skipped step, and
        raise :class:`BadStepError` if ``limit`` steps in a row were skipped.
        """
        if math.isfinite(float(loss)) and math.isfinite(float(norm)):
            self.in_a_row = 0
            return True
        self.skipped = self.skipped + 1
        self.in_a_row = self.in_a_row + 1
        if self.in_a_row >= self.limit:
            raise BadStepError(
                f"{self.in_a_row} steps in a row had a loss or gradients that were not finite (the last: loss "
                f"{float(loss)}, norm {float(norm)}): resume from an earlier state with a lower learning rate, or "
                "check the data of these steps"
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of skipped steps, for saving."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the numbers of skipped steps that :meth:`state_dict` returned."""
        self.skipped = state["skipped"]
        self.in_a_row = state["in_a_row"]
