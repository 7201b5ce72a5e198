"""Sum the gradients of key/value heads that several tensor ranks hold: each computes those of its own queries only.

With fewer key/value heads than ranks, consecutive ranks hold the same head (:attr:`hfscale.plan.Cut.replicas`)::

    tp4, 2 key/value heads      rank 0: kv0   rank 1: kv0   rank 2: kv1   rank 3: kv1
    backward                    sum over ranks 0 and 1      sum over ranks 2 and 3

The sum happens in the backward pass, on the parameter as it is read, so it is right under gradient accumulation, under
FSDP and in a plain ``loss.backward()`` loop; replicas, which start equal, stay bitwise equal. In a fused projection
only the matrices of keys and values are summed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...mesh import Mesh
from ...plan import ParameterPlan, Plan
from ...runtime.names import module_at, owner_of
from .partial_gradients import computes_with, read_through

# One all-reduce of a gradient: (dim, spans along it, group); no spans mean the full tensor.
_Sum = tuple[int, Sequence[tuple[int, int]], dist.ProcessGroup]


def install_replica_sums(model: nn.Module, plan: Plan, mesh: Mesh, holds: Callable[[str], bool]) -> None:
    """Sum, in backward, the gradients of parameters with heads that other tensor ranks hold too.

    ``mesh`` has the groups of :attr:`hfscale.plan.Plan.replicas`; ``holds`` says whether a parameter is on this rank.
    """
    sums: dict[nn.Module, dict[str, list[_Sum]]] = {}
    reader: dict[nn.Module, nn.Module] = {}
    for planned in plan.parameters:
        if _replicas(planned) and holds(planned.name):
            owner, name = owner_of(model, planned.name)
            sums.setdefault(owner, {})[name] = _sums_of(planned, mesh)
            # A wrapper may read its module's parameters besides calling it: DoRA reads the bias.
            reader[owner] = computes_with(model, module_at(model, planned.name.rpartition(".")[0]))
    for owner, wanted in sums.items():
        read_through(reader[owner], owner, {n: partial(_read, sums=s) for n, s in wanted.items()})


def _replicas(planned: ParameterPlan) -> list[int]:
    """List the sizes of the groups of tensor ranks over which the plan sums a parameter's replicated heads."""
    return [step.replicas for step in planned.reductions if step.kind == "sum-replicas" and step.axis == "tp"]


def _sums_of(planned: ParameterPlan, mesh: Mesh) -> list[_Sum]:
    cut = planned.cut_over("tp")
    assert cut is not None
    length, rank = planned.shape[cut.dim], mesh.tp_rank
    result: list[_Sum] = []
    for count in _replicas(planned):
        spans = cut.local_spans(length, rank, lambda replicas, count=count: replicas == count)  # type: ignore[misc]
        everything = set(cut.replicas) == {count}
        result.append((cut.dim, () if everything else spans, mesh.replicas[count]))
    return result


def _read(leaf: Tensor, sums: list[_Sum]) -> Tensor:
    return _Copied.apply(leaf, sums) if leaf.requires_grad else leaf


class _Copied(torch.autograd.Function):
    """Identity forward; all-reduce of (spans of) the gradient over the ranks with replicas backward."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, sums: list[_Sum]) -> Tensor:
        ctx.sums = sums
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy, since autograd may hand the same gradient tensor to another branch.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        for dim, spans, group in ctx.sums:
            if not spans:
                dist.all_reduce(grad, group=group)
                continue
            pieces = [grad.narrow(dim, start, stop - start) for start, stop in spans]
            flat = torch.cat([piece.reshape(-1) for piece in pieces])
            dist.all_reduce(flat, group=group)
            for piece, total in zip(pieces, flat.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(total.view_as(piece))
        return grad, None
