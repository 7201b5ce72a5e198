"""Count transformers' auxiliary router loss once over tensor ranks.

Every tensor rank computes all of it from the same router logits, and gradients of a block's input are summed over the
ranks, the router's too: with a gradient of ``1 / t`` on each rank it counts once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_COUNTED: ContextVar[bool] = ContextVar("router_loss_counted", default=False)


@contextmanager
def router_loss_counted_once() -> Iterator[None]:
    """Let a model compute its router loss inside the with block, to go through :func:`share_of_router_loss`."""
    token = _COUNTED.set(True)
    try:
        yield
    finally:
        _COUNTED.reset(token)


def is_counted() -> bool:
    """Return whether :func:`router_loss_counted_once` is active."""
    return _COUNTED.get()


def share_of_router_loss(loss: Tensor, ranks: int) -> Tensor:
    """Return the same value with ``1 / ranks`` of the gradient."""
    share = loss / ranks
    return share + (loss - share).detach()
