"""Parameters whose gradient each tensor rank sees a part of, so that the parts must be summed.

Per-head norms read by cut heads are one case; under sequence parallelism everything between the blocks is another: it
computes on this rank's share of the tokens. The bias of a row projection is a third: it must enter the sum over ranks
once, so one rank adds it and the others add zero.

The sum can happen at two times. *At once*, in the backward pass: while such a module computes, it finds its parameter
passed through :func:`hfscale.distributed.ops.enter`. That is right in a plain ``loss.backward()`` loop, with nothing to
remember afterwards. *Deferred*, for :func:`hfscale.train_step`, which knows when the step is over: the parameters are
read as they are, and one all-reduce over all of them follows the last backward pass, instead of one per parameter and
microbatch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch import own_parameters
from ...distributed.ops import enter
from ...plan import Plan
from ...train.runtime.gradients import add_back, gradients_aside
from ...train.runtime.names import computing, module_at
from ...train.runtime.shards import local_tensor


class PartialSums:
    """Sum partial gradients over the tensor ranks, in backward or at its end.

    Attributes:
        group: the tensor ranks.
        deferred: whether :meth:`at_the_end` is going to sum.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.deferred = group, False

    def read(self, parameter: Tensor) -> Tensor:
        """Return the parameter as a computation reads it; a local shard where data ranks shard it without gathering, as
        with experts.
        """
        return parameter if self.deferred else enter(local_tensor(parameter), self.group)

    @contextmanager
    def at_the_end(self, parameters: Sequence[Tensor], local: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Sum the gradients of the with block's backward passes over the tensor ranks at its end, and add them to
        earlier ones.

        Args:
            parameters: those with partial gradients, in an order that is the same on every rank.
            local: gives the plain tensor that this rank holds of a gradient.
        """
        with gradients_aside(parameters) as held:
            self.deferred = True
            try:
                yield
            finally:
                self.deferred = False
        _sum_together([local(p.grad) for p in parameters if p.grad is not None], self.group)
        for parameter, before in zip(parameters, held, strict=True):
            add_back(parameter, before)


@torch.no_grad()
def _sum_together(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum every tensor over the ranks, in place, with one all-reduce per type."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        same = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in same])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(same, flat.split([grad.numel() for grad in same]), strict=True):
            grad.copy_(total.view_as(grad))


def install_partial_sums(
    model: nn.Module, plan: Plan, sums: PartialSums, holds: Callable[[str], bool], first: bool
) -> None:
    """Let modules read the stock parameters whose gradients the plan sums over the tensor axis through ``sums``.

    Args:
        holds: says which parameters are on this rank.
        first: whether this is the tensor rank that contributes what enters a block's sum once.
    """
    once = {name for block in plan.blocks for name in (*block.once, *(f"{row}.bias" for row in block.row))}
    adapters = {adapter.name for adapter in plan.adapters}
    reads: dict[tuple[nn.Module, bool], dict[str, None]] = {}  # one module may have two names
    for planned in plan.parameters:
        if "tp" in planned.partial and planned.name not in adapters and holds(planned.name):
            owner, _, name = planned.name.rpartition(".")
            contributes = first or planned.name not in once
            reads.setdefault((module_at(model, owner), contributes), {})[name] = None
    for (module, contributes), names in reads.items():
        read_partial(module, sums, names=tuple(names), once=contributes)


def read_partial(
    module: nn.Module,
    sums: PartialSums,
    names: Sequence[str] | None = None,
    once: bool = True,
    holder: nn.Module | None = None,
) -> None:
    """Let ``module`` compute with the parameters ``names`` (all by default) of ``holder`` read through ``sums``.

    Args:
        once: whether this rank contributes the value; where ``False`` it computes with zeros, still with a gradient.
        holder: the module that holds them; by default ``module``, or the stock modules that are wrapped in it.
    """

    def read(leaf: Tensor) -> Tensor:
        # A frozen one is left as it is: it may be of a kind (4-bit) that does not survive being looked through.
        value = sums.read(leaf) if leaf.requires_grad else leaf
        return value if once else value * 0.0

    for held in computing(module) if holder is None else [holder]:
        own = [name for name, parameter in own_parameters(held).items() if parameter is not None]
        chosen = [name for name in own if names is None or name in names]
        if chosen:
            read_through(module, held, dict.fromkeys(chosen, read))


def read_through(module: nn.Module, holder: nn.Module, reads: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """Let ``module`` compute with parameters of ``holder`` as the functions ``reads`` make them of the leaves."""
    forward: Callable[..., Any] = module.forward

    def forward_reading(*args: Any, **kwargs: Any) -> Any:
        # Only for the time of the computation: anyone else who looks (FSDP, optimizers, state dicts) sees the leaf.
        leaves = {name: leaf for name in reads if (leaf := own_parameters(holder).get(name)) is not None}
        for name, leaf in leaves.items():
            own_parameters(holder)[name] = reads[name](leaf)
        try:
            return forward(*args, **kwargs)
        finally:
            own_parameters(holder).update(leaves)

    module.forward = forward_reading  # type: ignore[method-assign]


def computes_with(model: nn.Module, holder: nn.Module) -> nn.Module:
    """Return the module whose forward reads the parameters of ``holder``: itself, or the adapter around a
    ``ParameterDict``.
    """
    if not isinstance(holder, nn.ParameterDict):
        return holder
    return next(module for module in model.modules() if any(child is holder for child in module.children()))
