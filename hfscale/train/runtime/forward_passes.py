"""Find the forward pass to which a running computation belongs, even if activation checkpointing is recomputing a
layer.

A layer that is recomputed in a backward pass does not belong to the latest forward pass; in a pipeline, many passes may
have begun since. Autograd numbers its nodes in the order of their creation, and recomputation runs inside the backward
of a node of the original forward pass, so this node's number identifies the pass.
"""

from collections import deque
from typing import Generic, TypeVar

from ..._compat.torch import backward_pass, current_node_number, next_node_number
from ...errors import ConfigError

_KEPT = 1024  # maximum number of forward passes that wait for their backward pass
_T = TypeVar("_T")


class ForwardPasses(Generic[_T]):
    """Store a value of type ``_T`` for each of the latest forward passes, and look up the value of the pass that is
    being computed or recomputed.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[int, _T]] = deque(maxlen=_KEPT)

    def begin(self, known: _T) -> None:
        """Store the value ``known`` for the forward pass that begins now, or from now on for the rest of the running
        pass.
        """
        self._begun.append((next_node_number(), known))

    def forget_since(self, start: int) -> None:
        """Forget the values of the forward passes that began when autograd's next node had the number ``start``, or
        later, since none of them will have a backward pass.
        """
        while self._begun and self._begun[-1][0] >= start:
            self._begun.pop()

    @property
    def latest(self) -> _T:
        """Return the value that was stored last."""
        return self._begun[-1][1]

    def current(self) -> _T:
        """Return the value of the forward pass to which the running computation belongs: of the latest pass, or, in a
        recomputation, of the recomputed pass. Raise :class:`ConfigError` if this pass began more than 1024 passes ago.
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
    """Return whether activation checkpointing is recomputing a layer, inside a backward pass."""
    return backward_pass() != -1
