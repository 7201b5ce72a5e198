"""Tiny models of the same family as a big one; made in :mod:`hfscale.plan.clone`, which inference reads too."""

from ..plan.clone import HEAD_DIM, HEADS, HIDDEN, LAYERS, VOCABULARY, tiny_clone

__all__ = ["HEADS", "HEAD_DIM", "HIDDEN", "LAYERS", "VOCABULARY", "tiny_clone"]
