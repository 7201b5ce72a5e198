"""Tiny models of the same family as a big one; made in :mod:`hfscale.families.clone`, which inference reads too."""

from ..families.clone import EXPERT_FIELDS, EXPERTS, HEAD_DIM, HEADS, HIDDEN, LAYERS, VOCABULARY, tiny_clone

__all__ = ["EXPERTS", "EXPERT_FIELDS", "HEADS", "HEAD_DIM", "HIDDEN", "LAYERS", "VOCABULARY", "tiny_clone"]
