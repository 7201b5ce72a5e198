"""What this process waits for besides collectives, kept where a watchdog finds it: torch records no sends over gloo."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(eq=False)
class Waiting:
    """Something that a thread waits for.

    Attributes:
        call: ``send`` or ``recv``.
        peer: the rank of the run that it is to, or from.
        group: over which.
        since: by the clock of ``time.monotonic``.
    """

    call: str
    peer: int
    group: dist.ProcessGroup | None
    since: float = field(default_factory=time.monotonic)


_waits: list[Waiting] = []


@contextmanager
def waiting(call: str, peer: int, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within: this process waits for what ``peer`` sends, or takes."""
    one = Waiting(call, peer, group)
    _waits.append(one)
    try:
        yield
    finally:
        _waits.remove(one)


def waits() -> list[Waiting]:
    """All at this moment, the oldest first."""
    return list(_waits)
