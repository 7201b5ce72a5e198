"""The host's loss on routers over tensor ranks, for whoever counts it once.

Every tensor rank computes all of it from the same router logits, and what leaves a block's entry is summed over the
ranks, router gradients too: with a gradient of ``1 / t`` on each rank it counts once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_COUNTED: ContextVar[bool] = ContextVar("router_loss_counted", default=False)


@contextmanager
def router_loss_counted_once() -> Iterator[None]:
    """Within: a model may make the host's loss on routers; its gradient goes through :func:`share_of_router_loss`."""
    token = _COUNTED.set(True)
    try:
        yield
    finally:
        _COUNTED.reset(token)


def is_counted() -> bool:
    """Whether somebody does."""
    return _COUNTED.get()


def share_of_router_loss(loss: Tensor, ranks: int) -> Tensor:
    """The same value, with this rank's share of the gradient."""
    share = loss / ranks
    return share + (loss - share).detach()
