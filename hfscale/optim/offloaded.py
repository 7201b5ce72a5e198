"""Steps on the CPU under copies: the next parameters come down, and the last ones go up, while the CPU steps.

::

    outward  | 1 | 2 |    | 3 |    | 4 |            weights and gradients, into two pinned buffers in turn
    CPU          | step 1 | step 2 | step 3 | ...
    inward                | 1 |    | 2 |            weights, out of the same buffers

Small parameters are stepped together, and copied as one tensor. Who waits for whom, by events::

    outward waits for       compute, which makes gradients, and for the copy up that last read the buffer
    the CPU waits for       the copy down, which itself begins while the CPU steps those before
    compute waits for       the last copy up
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._compat.torch import copy_each
from ..distributed.host_buffers import Form, HostBuffers, buckets, bytes_before, views_of
from .sharded import Groups, Member, State
from .stock import Aside, OneByOneStepper

_BUCKET = 16 << 20  # bytes of small weights that are copied as one, by way of as much memory on the device


@dataclass
class _Taken:
    """Hold copies of some members' weights, and then of their gradients."""

    members: Sequence[Member]
    tensors: list[Tensor]  # on the device; kept until they have been copied
    forms: list[Form]
    buffer: Tensor
    copies: list[Tensor]
    copied: Any


class OffloadedStepper(OneByOneStepper):
    """Step copies on the CPU, of shards or, if ``full``, of gathered full tensors."""

    _aside: Aside
    _lanes: HostBuffers | None = None

    def step(self, groups: Groups, state: State) -> None:
        """Make one update; if of full tensors, communicates over the axes of each parameter's cuts."""
        parts = self._with_gradients()
        if not parts:
            return
        lanes = self._lanes = self._lanes or HostBuffers(parts[0][1][0].weight.device)
        coming, read = self._take(parts[0][1], lanes), None
        for (inner, _), (_, following) in zip(parts, [*parts[1:], (None, None)], strict=True):
            taken = coming
            taken.copied.synchronize()
            taken.tensors.clear()  # before the next ones are gathered
            if following is not None:
                coming = self._take(following, lanes)
            count, none = len(taken.members), (taken.copies[0].new_empty(0), None)
            pairs = dict(zip(taken.members, zip(taken.copies[:count], taken.copies[count:], strict=True), strict=True))
            inner.step(groups, state, lambda member, pairs=pairs, none=none: pairs.get(member, none))  # type: ignore[misc]
            read = self._put_back(taken, groups, lanes)
            inner.release()
        lanes.module.current_stream(lanes.device).wait_event(read)

    def _divided(self, members: Sequence[Member]) -> Iterable[Sequence[Member]]:
        parts = list(buckets(members, lambda member: bytes_before([self._form(member)])[-1], _BUCKET))
        self._most = max((bytes_before([self._form(each) for each in 2 * part])[-1] for part in parts), default=0)
        return parts

    def _form(self, member: Member) -> Form:
        weight = member.weight
        return member.planned.shape if self._full else weight.shape, self._aside.dtype_of(weight)

    def _take(self, members: Sequence[Member], lanes: HostBuffers) -> _Taken:
        """Begin to copy weights and gradients into a buffer."""
        every = [*(each.weight for each in members), *(each.gradient for each in members)]
        tensors = [self._whole(member, tensor) for member, tensor in zip([*members, *members], every, strict=True)]
        forms: list[Form] = [(tensor.shape, self._aside.dtype_of(tensor)) for tensor in tensors]
        size = bytes_before(forms)[-1]
        buffer = lanes.take(max(size, self._most))  # all of one size, so that two are enough
        copies = views_of(buffer, forms)
        lanes.outward.wait_stream(lanes.module.current_stream(lanes.device))
        with lanes.module.stream(lanes.outward):
            if len(members) > 1:
                packed = torch.empty(size, dtype=torch.uint8, device=lanes.device)
                copy_each(views_of(packed, forms), tensors)
                buffer[:size].copy_(packed, non_blocking=True)
            else:
                for copy, tensor in zip(copies, tensors, strict=True):
                    copy.copy_(tensor, non_blocking=True)
            copied = lanes.mark(lanes.outward)
        return _Taken(members, tensors, forms, buffer, copies, copied)

    def _put_back(self, taken: _Taken, groups: Groups, lanes: HostBuffers) -> Any:
        """Begin to copy stepped weights back; return the event of its end, behind which the buffer is free."""
        forms = taken.forms[: len(taken.members)]
        stepped = taken.copies[: len(forms)]
        with lanes.module.stream(lanes.inward):
            if len(forms) > 1:
                packed = torch.empty(bytes_before(forms)[-1], dtype=torch.uint8, device=lanes.device)
                packed.copy_(taken.buffer[: len(packed)], non_blocking=True)
                stepped = views_of(packed, forms)
            for member, weight in zip(taken.members, stepped, strict=True):
                self._write(member, weight, groups)
            read = lanes.mark(lanes.inward)
        lanes.give(taken.buffer, read)
        return read
