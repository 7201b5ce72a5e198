"""The latest forward passes of a model, and which of them a computation under way belongs to.

A layer that is recomputed belongs to an earlier pass than the latest, in a pipeline not even to the one before.
Autograd numbers its nodes as they are made, and recomputation runs inside the backward pass of a node that the first
computation made: its number says which pass that was.
"""

from collections import deque
from typing import Generic, TypeVar

from .._host.torch import backward_pass, current_node_number, next_node_number
from ..errors import ConfigError

_KEPT = 1024  # passes that may wait for their backward pass
_T = TypeVar("_T")


class ForwardPasses(Generic[_T]):
    """What is known of each."""

    def __init__(self) -> None:
        self._begun: deque[tuple[int, _T]] = deque(maxlen=_KEPT)

    def begin(self, known: _T) -> None:
        """A pass begins, or more is known of it from here on."""
        self._begun.append((next_node_number(), known))

    def clear(self) -> None:
        """No backward pass will come."""
        self._begun.clear()

    @property
    def latest(self) -> _T:
        """Of the pass that began last."""
        return self._begun[-1][1]

    def current(self) -> _T:
        """Of the pass that the computation under way belongs to.

        Raises:
            ConfigError: it is a recomputation, and too many passes have begun since.
        """
        if not recomputing():
            return self.latest
        number = current_node_number()
        for start, known in reversed(self._begun):
            if start <= number:
                return known
        raise ConfigError(
            f"more than {_KEPT} forward passes wait for their backward passes, and the oldest ones' layers cannot be "
            "recomputed any more: run backward earlier, or do without activation checkpointing"
        )


def recomputing() -> bool:
    """Whether this forward pass is activation checkpointing's second one, inside a backward pass."""
    return backward_pass() != -1
