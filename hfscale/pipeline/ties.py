"""Tensors that several stages hold: an embedding on the first, the head tied to it on the last.

Each stage sees the gradient of its own use; the sum over the stages is the tensor's gradient, and copies that start
equal stay equal under any optimizer that works entry by entry or tensor by tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ..runtime import Runtime, local_tensor


@contextmanager
def summed_over_stages(runtime: Runtime) -> Iterator[None]:
    """Within: a step leaves gradients; on leaving, those of tied copies are summed, and added to what there was."""
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
    groups = {id(group): group for _, _, group in tied}
    for key, group in groups.items():  # in the plan's order, so the same on all ranks of a group
        members = [(parameter, before) for parameter, before, other in tied if id(other) == key]
        # What no stage has a gradient of (a table that is read without one) stays without: optimizers skip it then.
        used = torch.tensor([int(parameter.grad is not None) for parameter, _ in members], device=runtime.mesh.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        for (parameter, before), anywhere in zip(members, used.tolist(), strict=True):
            if not anywhere:
                parameter.grad = before
                continue
            if parameter.grad is None:  # the other stage has one
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_tensor(parameter.grad), group=group)
            if before is not None:
                parameter.grad = before.add_(parameter.grad)
