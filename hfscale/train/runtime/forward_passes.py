"""Find the forward pass to which a computation belongs, even inside activation checkpointing.

A recomputed layer belongs to an earlier forward pass than the latest; in a pipeline, many passes may lie between.
Autograd numbers its nodes in the order of their creation, and recomputation runs inside the backward of a node of the
original forward pass, so this node's number identifies the pass.
"""

from collections import deque
from typing import Generic, TypeVar

from ..._compat.torch import backward_pass, current_node_number, next_node_number
from ...errors import ConfigError

_KEPT = 1024  # maximum number of forward passes that wait for their backward pass
_T = TypeVar("_T")


class ForwardPasses(Generic[_T]):
    """Hold the latest forward passes, with a value of type ``_T`` for each."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, _T]] = deque(maxlen=_KEPT)

    def begin(self, known: _T) -> None:
        """Record that a forward pass begins, or that the current pass has another value from now on."""
        self._begun.append((next_node_number(), known))

    def clear(self) -> None:
        """Forget all forward passes: no backward pass will follow."""
        self._begun.clear()

    @property
    def latest(self) -> _T:
        """Return the value of the pass that began last."""
        return self._begun[-1][1]

    def current(self) -> _T:
        """Return the value of the running computation's forward pass; raise if too many passes began after that
        pass.
        """
        if not recomputing():
            return self.latest
        number = current_node_number()
        for start, known in reversed(self._begun):
            if start <= number:
                return known
        raise ConfigError(
            f"more than {_KEPT} forward passes wait for their backward passes, so the layers of the oldest forward "
            "passes cannot be recomputed any more: run backward earlier, or turn activation checkpointing off"
        )


def recomputing() -> bool:
    """Return whether this forward pass is a recomputation by activation checkpointing, inside a backward pass."""
    return backward_pass() != -1
