"""Find the forward pass to which a running computation belongs, even if activation checkpointing is recomputing a
layer.

A layer that is recomputed in a backward pass does not belong to the latest forward pass; in a pipeline, many passes may
have begun since. Autograd numbers its nodes in the order of their creation, and recomputation runs inside the backward
of a node of the original forward pass, so this node's number identifies the pass. Inside a reentrant checkpoint, a
second backward pass runs within the first one, over nodes that the recomputation has made (on GPUs in another thread,
which has its own numbers): they belong to the pass that the first one was recomputing.
"""

from collections import deque
from typing import Generic, TypeVar

from ..._compat.torch import (
    backward_pass,
    call_after_backward,
    current_node_number,
    next_node_number,
)
from ...errors import ConfigError

_KEPT = 1024  # maximum number of forward passes that wait for their backward pass
_T = TypeVar("_T")


class ForwardPasses(Generic[_T]):
    """Store a value of type ``_T`` for each of the latest forward passes, and look up the value of the pass that is
    being computed or recomputed.
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[int, _T]] = deque(maxlen=_KEPT)
        # the outermost backward pass that is recomputing, and the value of the forward pass that it recomputes
        self._recomputed: tuple[int, _T] | None = None

    def begin(self, known: _T) -> None:
        """Store the value ``known`` for the forward pass that begins now, or from now on for the rest of the running
        pass.
        """
        self._begun.append((next_node_number(), known))
        self._forget_recomputed()

    def forget_since(self, start: int) -> None:
        """Forget the values of the forward passes that began when autograd's next node had the number ``start``, or
        later, since none of them will have a backward pass.
        """
        while self._begun and self._begun[-1][0] >= start:
            self._begun.pop()
        self._forget_recomputed()

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
        backward = backward_pass()
        if self._recomputed is not None and self._recomputed[0] != backward:
            return self._recomputed[1]
        number = current_node_number()
        for start, known in reversed(self._begun):
            if start <= number:
                if self._recomputed is None:
                    call_after_backward(self._forget_recomputed)
                self._recomputed = backward, known
                return known
        raise ConfigError(
            f"more than {_KEPT} forward passes wait for their backward passes, so the layers of the oldest forward "
            "passes cannot be recomputed any more: run backward earlier, or turn activation checkpointing off"
        )

    def _forget_recomputed(self) -> None:
        self._recomputed = None


def recomputing() -> bool:
    """Return whether activation checkpointing is recomputing a layer, inside a backward pass."""
    return backward_pass() != -1
