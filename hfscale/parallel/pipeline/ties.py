"""Tensors that several stages hold: an embedding on the first, the head tied to it on the last.

Each stage sees the gradient of its own use; the sum over the stages is the tensor's gradient, and copies that start
equal stay equal under any optimizer that works entry by entry or tensor by tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigError
from ...runtime import Runtime, local_tensor


@contextmanager
def summed_over_stages(runtime: Runtime) -> Iterator[None]:
    """Within: a step leaves gradients; on leaving, those of tied copies are summed, and added to what there was."""
    tied: list[tuple[Tensor, Tensor | None, tuple[int, ...]]] = []
    for planned, parameter in runtime.parameters() if runtime.plan.ties else ():
        holders = runtime.plan.holders(planned.name)
        if len(holders) > 1 and parameter.requires_grad:
            tied.append((parameter, parameter.grad, holders))
            parameter.grad = None
    try:
        yield
    except BaseException:  # a step that failed leaves the gradients that were there before it
        for parameter, before, _ in tied:
            parameter.grad = before
        raise
    for holders in dict.fromkeys(holders for _, _, holders in tied):  # in the plan's order: the same on all of a group
        members, group = [(p, before) for p, before, others in tied if others == holders], runtime.mesh.ties[holders]
        own = [parameter.grad is not None for parameter, _ in members]
        used = _used_anywhere(runtime, [parameter for parameter, _ in members], own, holders)
        for (parameter, before), mine, anywhere in zip(members, own, used, strict=True):
            if mine and not anywhere:
                raise ConfigError(
                    "a tensor that several stages hold had no gradient in the first step and has one now: build the "
                    "model again for batches of another kind"
                )
            if not anywhere:
                parameter.grad = before
                continue
            if parameter.grad is None:  # the other stage has one
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local_tensor(parameter.grad), group=group)
            if before is not None:
                parameter.grad = before.add_(parameter.grad)


def _used_anywhere(runtime: Runtime, parameters: list[Tensor], own: list[bool], holders: tuple[int, ...]) -> list[bool]:
    """Which tied tensors any stage has a gradient of; what none has one of (a table that is read without) stays
    without, and optimizers skip it. Asked in the first step, through the host, for it is the model's doing.
    """
    known, key = runtime.tied_gradients, tuple(map(id, parameters))
    if key not in known:
        used = torch.tensor(own, dtype=torch.int64)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=runtime.mesh.tie_reports[holders])
        known[key] = [bool(each) for each in used.tolist()]
    return known[key]
