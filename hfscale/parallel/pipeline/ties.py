"""Sum gradients of tensors that several stages hold: an embedding on the first, the head tied to it on the last.

Each stage sees the gradient of its own use; the sum over the stages is the tensor's gradient, and copies that start
equal stay equal under any optimizer that works elementwise or tensor by tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import ConfigError
from ...train.runtime import Runtime, local_tensor
from ...train.runtime.shards import add_back, gradients_aside


@dataclass
class _Copy:
    """Hold this rank's copy of a tied tensor: the parameter, the ranks that hold it, and its gradient before a step."""

    parameter: Tensor
    holders: tuple[int, ...]
    before: Tensor | None


class TiedGradients:
    """Sum the gradients of tensors that several stages hold."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[tuple[int, ...], list[bool]] = {}  # which get a gradient, once a step has shown it

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sum the gradients of tied tensors over their stages after the with block, and add them to earlier ones."""
        tied = self._tied()
        with gradients_aside([parameter for parameter, _ in tied]) as before:
            yield
        copies = [_Copy(*each, gradient) for each, gradient in zip(tied, before, strict=True)]
        for holders in dict.fromkeys(copy.holders for copy in copies):  # the plan's order, equal on all ranks
            self._sum([copy for copy in copies if copy.holders == holders], holders)

    def _tied(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Return this rank's trained copies of tied tensors, each with the pipeline ranks that hold one."""
        plan = self._runtime.plan
        if not plan.ties:
            return []
        here = [(parameter, plan.holders(planned.name)) for planned, parameter in self._runtime.parameters()]
        return [(parameter, holders) for parameter, holders in here if len(holders) > 1 and parameter.requires_grad]

    def _sum(self, copies: list[_Copy], holders: tuple[int, ...]) -> None:
        group = self._runtime.mesh.ties[holders]
        for copy, used in zip(copies, self._used_anywhere(copies, holders), strict=True):
            parameter = copy.parameter
            if parameter.grad is not None and not used:
                raise ConfigError(
                    "a tied tensor had no gradient in the first step and has one now: build the "
                    "model again for batches of another kind"
                )
            if used:
                if parameter.grad is None:  # the other stage has one
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local_tensor(parameter.grad), group=group)
            add_back(parameter, copy.before)

    def _used_anywhere(self, copies: list[_Copy], holders: tuple[int, ...]) -> list[bool]:
        """Return which tensors have a gradient on any stage; the others keep ``grad=None``, and optimizers skip them.
        Communicates through the host in the first step only: the model decides it.
        """
        key = tuple(id(copy.parameter) for copy in copies)
        if key not in self._known:
            used = torch.tensor([copy.parameter.grad is not None for copy in copies], dtype=torch.int64)
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._runtime.mesh.tie_reports[holders])
            self._known[key] = [bool(each) for each in used.tolist()]
        return self._known[key]


def list_under_first_names(runtime: Runtime) -> None:
    """Let ``model.named_parameters()`` list a tied tensor under the name that the stock model lists it under, also on a
    stage that has it under another one: code that chooses parameters by their names (to freeze some, to decay others)
    then chooses the same ones on every stage, as in one process.
    """
    held = runtime.plan.local_names(runtime.mesh.pp_rank)
    first = {here: owned for owned, here in held.items() if here != owned}
    if not first:
        return
    listed = runtime.model.named_parameters

    def named_parameters(
        prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        start = f"{prefix}." if prefix else ""
        for name, parameter in listed(prefix, recurse, remove_duplicate):
            own = name.removeprefix(start)
            yield (start + first[own] if remove_duplicate and own in first else name), parameter

    runtime.model.named_parameters = named_parameters
