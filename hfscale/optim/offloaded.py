"""Step offloaded parameters on the CPU, and overlap steps with copies of the next and the previous parameters.

::

    outward  | 1 | 2 |    | 3 |    | 4 |            weights and gradients to two pinned buffers, alternately
    CPU          | step 1 | step 2 | step 3 | ...
    inward                | 1 |    | 2 |            weights from the same buffers to the device

Small parameters are stepped together, and copied as one tensor. Streams and the CPU wait for events::

    outward waits for       compute, which computes gradients, and for the copy to the device that last read the buffer
    the CPU waits for       the copy to the CPU, which begins while the CPU steps the previous parameters
    compute waits for       the last copy to the device
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from ..distributed.host_buffers import (
    Form,
    HostBuffers,
    buckets,
    bytes_before,
    in_one_buffer,
    views_of,
)
from .sharded import Groups, Member, State
from .stock import Aside, OneByOneStepper, StockOverStandIns

# Most bytes of small weights that are copied as one tensor; the copy needs as many bytes on the device.
_BUCKET = 16 << 20


class Pair:
    """Hold the two pinned buffers that all offloaded steppers of an optimizer use, one stepper after the other."""

    size = 0  # bytes of each buffer, enough for any group of parameters that is stepped together
    lanes: HostBuffers | None = None


class OffloadedStepper(OneByOneStepper):
    """Update copies of weights on the CPU, and write the results back: copies of this rank's shards, or, if ``full``,
    of full tensors gathered from shards.
    """

    _aside: Aside

    def __init__(self, pair: Pair, *given: Any) -> None:
        """Make a stepper with the buffers ``pair``, and the arguments of :class:`OneByOneStepper`."""
        self._pair = pair
        super().__init__(*given)

    def step(self, groups: Groups, state: State) -> None:
        """Make one update. If full tensors are updated, first gather them over the ranks that shard them."""
        parts = self._with_gradients()
        if not parts:
            return
        lanes = self._pair.lanes = self._pair.lanes or HostBuffers(parts[0][1][0].weight.device)
        stages = [self._stages(inner, members, groups, state, lanes) for inner, members in parts]
        try:
            next(stages[0])
            for own, following in zip_longest(stages, stages[1:], fillvalue=iter(())):
                next(own)  # waits for its copies to the CPU
                next(following, None)  # begins to copy the next parameters
                next(own, None)  # steps, and begins to copy back
        except BaseException:
            self._pair.lanes = None  # free the buffers
            for stream in (lanes.outward, lanes.inward):
                lanes.mark(stream).synchronize()
            raise
        lanes.module.current_stream(lanes.device).wait_stream(lanes.inward)

    def _stages(
        self,
        inner: StockOverStandIns,
        members: Sequence[Member],
        groups: Groups,
        state: State,
        lanes: HostBuffers,
    ) -> Iterator[None]:
        """Run one group's update in three stages with a ``yield`` between them: begin to copy weights and gradients to
        the CPU; wait for the copies; update on the CPU, and begin to copy weights back.
        """
        forms = [self._form(member) for member in members]
        buffer = lanes.take(self._pair.size)
        tensors = [self._whole(each, each.weight) for each in members]
        tensors += [self._whole(each, each.gradient) for each in members]
        copies = views_of(buffer, 2 * forms)
        count = len(members)
        size = self._bytes(members)
        if count > 1:
            tensors = [in_one_buffer(tensors, 2 * forms)]
        copied = lanes.copy_out([buffer[: 2 * size]] if count > 1 else copies, tensors)
        yield
        copied.synchronize()
        tensors.clear()  # free gathered tensors before the next ones are gathered
        yield
        pairs = dict(zip(members, zip(copies, copies[count:], strict=False), strict=True))
        none = copies[0].new_empty(0)
        inner.step(groups, state, lambda member: pairs.get(member, (none, None)))
        with lanes.module.stream(lanes.inward):
            if count > 1:
                copies = views_of(
                    buffer[:size].to(lanes.device, non_blocking=True, copy=True), forms
                )
            for member, weight in zip(members, copies, strict=False):
                self._write(member, weight, groups)
            lanes.give(buffer, lanes.mark(lanes.inward))
        inner.release()

    def _divided(self, members: Sequence[Member]) -> Iterable[Sequence[Member]]:
        parts = list(buckets(members, lambda member: self._bytes([member]), _BUCKET))
        self._pair.size = max(
            self._pair.size,
            2 * max(map(self._bytes, parts), default=0),
        )
        return parts

    def _bytes(self, members: Sequence[Member]) -> int:
        return bytes_before([self._form(member) for member in members])[-1]

    def _form(self, member: Member) -> Form:
        weight = member.weight
        return member.planned.shape if self._full else weight.shape, self._aside.dtype_of(weight)
