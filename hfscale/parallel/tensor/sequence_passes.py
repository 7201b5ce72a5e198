"""The forward passes of a layer stack under sequence parallelism, and to which of them a recomputed layer belongs."""

import weakref
from typing import Any

from torch import Tensor

from ...errors import ConfigError
from ...plan.cut import share_evenly

TOKENS = 1
"""The dim of ``[b, s, h]`` that holds tokens."""


class ForwardPass:
    """One forward pass: ``samples`` of ``total`` tokens, and whether its backward pass is over."""

    def __init__(self, total: int, samples: int) -> None:
        self.total, self.samples, self.done = total, samples, False

    def end_with(self, share: Tensor) -> None:
        """Mark the pass as over once the gradient of ``share``, its first layer's input, is computed."""
        if share.requires_grad:
            share.register_hook(lambda grad: self._end())
        keep_with_graph(share, self)

    def _end(self) -> None:
        self.done = True


class ForwardPasses:
    """The forward passes of one region, alive as long as their graphs are.

    Attributes:
        latest: the pass that began last.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.latest: ForwardPass | None = None
        self._begun: list[weakref.ref[ForwardPass]] = []

    def begin(self, total: int, share: Tensor) -> None:
        """Begin a pass over samples of ``total`` tokens, of which this rank has ``share [b, s/t, h]``."""
        self.latest = ForwardPass(total, share.shape[0])
        self._begun.append(weakref.ref(self.latest))
        self.latest.end_with(share)

    def waiting(self) -> list[ForwardPass]:
        """Return the passes whose graphs are alive and had no backward pass yet; if none, the latest."""
        self._begun = [reference for reference in self._begun if reference() is not None]
        alive = [found for reference in self._begun if (found := reference()) is not None and not found.done]
        return alive or ([self.latest] if self.latest is not None else [])

    def of_recomputed(self, x: Tensor, whole: bool) -> ForwardPass:
        """Find the pass for which ``x`` is recomputed; every rank finds the same one, or raises."""
        kinds = {(found.total, found.samples if x.ndim == 2 else 0): found for found in self.waiting()}
        shares = [share_evenly(total, self.size) for total, _ in kinds]
        mixed = any(
            a == b for i, one in enumerate(shares) for other in shares[:i] for a, b in zip(one, other, strict=True)
        )
        if len(kinds) > 1 and (mixed or x.ndim == 2):
            raise ConfigError(
                f"sequence_parallel=True: forward passes over {', '.join(str(total) for total, _ in kinds)} tokens "
                "wait for their backward passes, and their recomputed layers cannot be told apart: run backward after "
                "each forward pass, pad them to one length, or do without activation checkpointing"
            )
        for found in kinds.values():
            length = found.total if whole else share_evenly(found.total, self.size)[self.rank]
            if len(kinds) == 1 or x.shape[TOKENS] == length:
                return found
        raise ConfigError(f"sequence_parallel=True: no forward pass had {x.shape[TOKENS]} tokens here: run it again")


def keep_with_graph(x: Tensor, thing: Any) -> None:
    """Keep ``thing`` alive as long as the graph of ``x`` is."""
    node: Any = x.grad_fn
    if node is not None:
        node.metadata["hfscale pass"] = thing
    else:  # a leaf received from another stage, which is kept until its backward pass
        x._hfscale_pass = thing  # type: ignore[attr-defined]
