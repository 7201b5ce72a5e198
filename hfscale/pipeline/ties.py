"""Tensors that several stages hold: an embedding on the first, the head tied to it on the last.

Each stage sees the gradient of its own use; the sum over the stages is the tensor's gradient, and copies that start
equal stay equal under any optimizer that works entry by entry or tensor by tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime import Runtime


@contextmanager
def summed_over_stages(runtime: Runtime, local: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within: a step that leaves gradients; on leaving, those of tied copies are summed, and added to what there was.

    Args:
        local: gives the plain tensor that this rank holds of a gradient.
    """
    tied: list[tuple[Tensor, Tensor | None, dist.ProcessGroup]] = []
    for planned, parameter in runtime.parameters() if runtime.plan.ties else ():
        holders = runtime.plan.holders(planned.name)
        if len(holders) > 1 and parameter.requires_grad:
            tied.append((parameter, parameter.grad, runtime.mesh.ties[holders]))
            parameter.grad = None
    try:
        yield
    except BaseException:  # a step that failed leaves the gradients that were there before it
        for parameter, before, _ in tied:
            parameter.grad = before
        raise
    for parameter, before, group in tied:
        if parameter.grad is None:  # the other stage may have one
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(local(parameter.grad), group=group)
        if before is not None:
            parameter.grad = before.add_(parameter.grad)
