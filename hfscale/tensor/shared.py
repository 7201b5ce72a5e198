"""Parameters whose gradient each tensor rank sees a part of, so that the parts must be summed.

Per-head norms read by cut heads are one case; under sequence parallelism everything between the blocks is another: it
computes on this rank's share of the tokens. The bias of a row projection is a third: it must enter the sum over ranks
once, so one rank adds it and the others add zero.

The sum can happen at two times. *At once*, in the backward pass: while such a module computes, it finds its parameter
passed through :func:`hfscale.ops.enter`. That is right in a plain ``loss.backward()`` loop, with nothing to remember
afterwards. *Deferred*, for :func:`hfscale.train_step`, which knows when the step is over: the parameters are read as
they are, and one all-reduce over all of them follows the last backward pass, instead of one per parameter and
microbatch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ops import enter


class PartialSums:
    """When, and over which ranks, the parts of partial gradients are summed.

    Attributes:
        group: the tensor ranks.
        deferred: whether :meth:`at_the_end` is going to sum.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.deferred = group, False

    def read(self, parameter: Tensor) -> Tensor:
        """The parameter as a computation should see it."""
        return parameter if self.deferred else enter(parameter, self.group)

    @contextmanager
    def at_the_end(self, parameters: Sequence[Tensor], local: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within: backward passes leave parts; on leaving, what they left is summed, and added to what there was.

        Args:
            parameters: those with partial gradients, in an order that is the same on every rank.
            local: gives the plain tensor that this rank holds of a gradient.
        """
        held = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.deferred = True
        try:
            yield
        except BaseException:  # a step that failed leaves the gradients that were there before it
            for parameter, before in held:
                parameter.grad = before
            raise
        finally:
            self.deferred = False
        _sum_together([local(p.grad) for p in parameters if p.grad is not None], self.group)
        for parameter, before in held:
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


@torch.no_grad()
def _sum_together(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum every tensor over the ranks, in place, with one all-reduce per type."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        same = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in same])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(same, flat.split([grad.numel() for grad in same]), strict=True):
            grad.copy_(total.view_as(grad))


def read_partial(module: nn.Module, sums: PartialSums, names: Sequence[str] | None = None, once: bool = True) -> None:
    """Let ``module`` compute with its parameters ``names`` (all of its own by default) read through ``sums``.

    Args:
        once: whether this rank contributes the value; where ``False`` it computes with zeros, still with a gradient.
    """
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    chosen = [name for name in own if names is None or name in names]
    if not chosen:
        return
    forward: Callable[..., Any] = module.forward

    def partial_forward(*args: Any, **kwargs: Any) -> Any:
        # Only for the time of the computation: anyone else who looks (FSDP, optimizers, state dicts) sees the leaf.
        leaves = {name: module._parameters[name] for name in chosen}
        for name, leaf in leaves.items():
            value = sums.read(leaf)  # type: ignore[arg-type]
            module._parameters[name] = value if once else value * 0.0  # type: ignore[assignment]
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(leaves)

    module.forward = partial_forward  # type: ignore[method-assign]
