"""transformers' own router loss under tensor parallelism.

Every tensor rank computes the full loss from the same router logits, and gradients are summed over the ranks at a
block's entry, the router's too: so each rank scales the loss's gradient by ``1 / t``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_COUNTED: ContextVar[bool] = ContextVar("router_loss_counted", default=False)


@contextmanager
def router_loss_counted_once() -> Iterator[None]:
    """Permit transformers' router loss inside the with block; the caller scales it by :func:`share_of_router_loss`."""
    token = _COUNTED.set(True)
    try:
        yield
    finally:
        _COUNTED.reset(token)


def is_counted() -> bool:
    """Return whether :func:`router_loss_counted_once` is active."""
    return _COUNTED.get()


def share_of_router_loss(loss: Tensor, ranks: int) -> Tensor:
    """Return ``loss`` with its value unchanged and its gradient divided by ``ranks``."""
    share = loss / ranks
    return share + (loss - share).detach()
