"""Registry of this process's pending sends and receives for the watchdog: torch records no sends over gloo."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(eq=False)
class Waiting:
    """A send or receive that a thread waits for."""

    call: str
    peer: int
    group: dist.ProcessGroup | None
    since: float = field(default_factory=time.monotonic)


_waits: list[Waiting] = []


@contextmanager
def waiting(call: str, peer: int, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Register inside the ``with`` block that this process waits for ``peer`` to send or receive."""
    one = Waiting(call, peer, group)
    _waits.append(one)
    try:
        yield
    finally:
        _waits.remove(one)


def waits() -> list[Waiting]:
    """Return all pending waits, the oldest first."""
    return list(_waits)
