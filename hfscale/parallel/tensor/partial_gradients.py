"""Sum partial gradients: gradients of replicated parameters that are a sum of one term per tensor rank.

There are three cases: per-head norms, which each rank applies to its own heads; under sequence parallelism, all
parameters between the blocks, which each rank applies to its own tokens; and the bias of a row projection. The bias
must enter the sum over ranks once, so one rank adds the bias and all other ranks add zero.

The sum can be made at two times. *In the backward pass*: while such a module computes, its parameter is replaced by the
output of ``copy_to_tp_region``, whose backward pass is an all-reduce. This works in a plain ``loss.backward()`` loop.
*Deferred*, for :func:`hfscale.train_step`, which controls the end of the step: modules read their parameters directly,
and after the last backward pass one all-reduce sums all partial gradients, instead of one per parameter and microbatch.

Key/value heads that several ranks hold are a separate case: each rank computes their gradient for its own queries only.
If there are fewer key/value heads than ranks, consecutive ranks hold the same head
(:attr:`hfscale.plan.Cut.replicas`)::

    tp4, 2 key/value heads      rank 0: kv0   rank 1: kv0   rank 2: kv1   rank 3: kv1
    backward                    sum over ranks 0 and 1      sum over ranks 2 and 3

This sum is always made in the backward pass, on the gradient of the parameter as it is read. Replicas start equal and
therefore stay bitwise equal. In a fused projection only the gradients of the key and value matrices are summed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.replaced import attribute_replaced
from ..._compat.torch import own_parameters
from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import all_reduce_together, apply_mapping, copy_to_tp_region
from ...plan import ParameterPlan, Plan
from ...train.runtime.parameter_names import computing, module_at, owner_of
from ...train.runtime.shards import gradients_aside, local_tensor

_READS = "_hfscale_reads"

# One all-reduce of a gradient: (dim, spans along this dim, group); without spans, the full tensor is reduced.
_Sum = tuple[int, Sequence[tuple[int, int]], dist.ProcessGroup]


class PartialSums:
    """Sum partial gradients over tensor ranks: in the backward pass, or at the end of an :meth:`at_the_end` block."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.deferred = False

    def read(self, parameter: Tensor) -> Tensor:
        """Return the tensor that a module computes with in place of ``parameter``.

        For an expert's parameter that data ranks do not gather, this tensor is the local shard.
        """
        return (
            parameter if self.deferred else copy_to_tp_region(local_tensor(parameter), self.group)
        )

    @contextmanager
    def at_the_end(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Sum the gradients that ``parameters`` get in the ``with`` block over the ranks, after the block.

        The order of ``parameters`` must be the same on all ranks. Gradients from before the block are not summed again.
        """
        with gradients_aside(parameters):
            with attribute_replaced(self, "deferred", True):
                yield
            grads = [local_tensor(p.grad) for p in parameters if p.grad is not None]
            with torch.no_grad():
                for dtype in dict.fromkeys(grad.dtype for grad in grads):
                    all_reduce_together([grad for grad in grads if grad.dtype == dtype], self.group)


def install_partial_sums(
    model: nn.Module,
    plan: Plan,
    sums: PartialSums,
    holds: Callable[[str], bool],
    first: bool,
) -> None:
    """Make modules read their parameters with partial gradients through ``sums``.

    Args:
        model: the model.
        plan: names the parameters with partial gradients.
        sums: sums their gradients.
        holds: returns whether this rank holds a parameter.
        first: whether this rank adds the biases of row projections.
    """
    once = {
        name
        for block in plan.blocks
        for name in (*block.once, *(f"{row}.bias" for row in block.row))
    }
    adapters = {adapter.name for adapter in plan.adapters}
    gathered = [name for region in plan.sequence_regions for name in region.gathered]
    # one module may have two names
    reads: dict[tuple[nn.Module, nn.Module, bool], dict[str, None]] = {}
    for planned in plan.parameters:
        if "tp" in planned.partial and planned.name not in adapters and holds(planned.name):
            owner, _, name = planned.name.rpartition(".")
            # A module that mixes tokens may read its children's parameters without calling them (a convolution's).
            reader = next((each for each in gathered if f"{owner}.".startswith(f"{each}.")), owner)
            modules = module_at(model, reader), module_at(model, owner)
            contributes = first or planned.name not in once
            reads.setdefault((*modules, contributes), {})[name] = None
    for (module, wrapped, contributes), names in reads.items():
        for holder in computing(wrapped):
            read_partial(module, sums, tuple(names), contributes, holder)


def read_partial(
    module: nn.Module,
    sums: PartialSums,
    names: Sequence[str],
    once: bool,
    holder: nn.Module,
) -> None:
    """Make ``module`` read parameters through ``sums``.

    Args:
        module: the module whose forward pass reads the parameters.
        sums: sums their gradients.
        names: the parameters' names; the holder may lack some of them.
        once: if false, the module computes with zeros in place of the values, but the parameters still get gradients.
        holder: the module that holds the parameters.
    """

    def read(leaf: Tensor) -> Tensor:
        # Frozen parameters are left unchanged: 4-bit parameters would lose their class.
        value = sums.read(leaf) if leaf.requires_grad else leaf
        return value if once else value * 0.0

    own = own_parameters(holder)
    chosen = [name for name in names if own.get(name) is not None]
    if chosen:
        read_through(module, holder, dict.fromkeys(chosen, read))


def read_through(
    module: nn.Module,
    holder: nn.Module,
    reads: dict[str, Callable[[Tensor], Tensor]],
) -> None:
    """Replace parameters of ``holder`` by ``reads[name](parameter)`` during each forward pass of ``module``."""
    forward: Callable[..., Any] = module.forward

    def forward_reading(*args: Any, **kwargs: Any) -> Any:
        # Replaced only during the forward pass: FSDP, optimizers and state dicts must find the leaf parameter.
        leaves = {
            name: leaf for name in reads if (leaf := own_parameters(holder).get(name)) is not None
        }
        values = {name: reads[name](leaf) for name, leaf in leaves.items()}
        if all(values[name] is leaf for name, leaf in leaves.items()):
            return forward(*args, **kwargs)
        own_parameters(holder).update(values)
        try:
            return forward(*args, **kwargs)
        finally:
            own_parameters(holder).update(leaves)

    module.forward = forward_reading  # type: ignore[method-assign]
    if module is holder:
        vars(module).setdefault(_READS, []).append(reads)


def as_read(module: nn.Module, name: str) -> Tensor | None:
    """Return the tensor that the forward pass of ``module`` reads in place of its parameter ``name``, for code that
    replaces this forward pass. Return ``None`` if there is no such parameter.
    """
    value: Tensor | None = own_parameters(module).get(name)
    # the last replacement wraps the earlier ones
    for reads in reversed(vars(module).get(_READS, ())):
        if value is not None and name in reads:
            value = reads[name](value)
    return value


def computes_with(model: nn.Module, holder: nn.Module) -> nn.Module:
    """Return the module whose forward pass reads the parameters of ``holder``.

    This is ``holder``, or for a ParameterDict the adapter that contains it.
    """
    if not isinstance(holder, nn.ParameterDict):
        return holder
    return next(
        module for module in model.modules() if any(child is holder for child in module.children())
    )


def install_replica_sums(
    model: nn.Module, plan: Plan, mesh: Mesh, holds: Callable[[str], bool]
) -> None:
    """Sum the gradients of replicated key/value heads in the backward pass.

    The sums are over the process groups of :attr:`hfscale.plan.Plan.replicas`.
    """
    sums: dict[nn.Module, dict[str, list[_Sum]]] = {}
    reader: dict[nn.Module, nn.Module] = {}
    for planned in plan.parameters:
        if _replicas(planned) and holds(planned.name):
            owner, name = owner_of(model, planned.name)
            sums.setdefault(owner, {})[name] = _sums_of(planned, mesh)
            # A wrapper may also read its module's parameters directly: DoRA reads the bias.
            reader[owner] = computes_with(
                model,
                module_at(model, planned.name.rpartition(".")[0]),
            )
    for owner, wanted in sums.items():
        read_through(
            reader[owner],
            owner,
            {n: partial(_read, sums=s) for n, s in wanted.items()},
        )


def _replicas(planned: ParameterPlan) -> list[int]:
    """Return the sizes of the groups of consecutive tensor ranks over which a parameter's gradient is summed, since
    they hold the same shard.
    """
    return [
        step.replicas
        for step in planned.reductions
        if step.kind == "sum-replicas" and step.axis == "tp"
    ]


def _sums_of(planned: ParameterPlan, mesh: Mesh) -> list[_Sum]:
    cut = planned.cut_over("tp")
    assert cut is not None
    length = planned.shape[cut.dim]
    rank = mesh.tp_rank
    result: list[_Sum] = []
    for count in _replicas(planned):
        spans = cut.local_spans(length, rank, lambda replicas, count=count: replicas == count)  # type: ignore[misc]
        everything = set(cut.replicas) == {count}
        result.append((cut.dim, () if everything else spans, mesh.replicas[count]))
    return result


def _read(leaf: Tensor, sums: list[_Sum]) -> Tensor:
    return (
        apply_mapping(leaf, None, partial(_all_reduced, sums=sums)) if leaf.requires_grad else leaf
    )


def _all_reduced(grad: Tensor, sums: list[_Sum]) -> Tensor:
    """All-reduce a gradient, or only some of its rows or columns, over the ranks that hold the same key/value heads."""
    # A copy, because autograd may pass the same gradient tensor to another branch.
    grad = grad.clone(memory_format=torch.contiguous_format)
    for dim, spans, group in sums:
        if not spans:
            dist.all_reduce(grad, group=group)
            continue
        all_reduce_together([grad.narrow(dim, start, stop - start) for start, stop in spans], group)
    return grad
