"""Sequences that several ranks have parts of: who has which tokens, and attention as a stock model asks for it."""

from .cut import CutBatch, cut_batch, shape_of
from .masks import MaskBlocks
from .split import Split, choose, heads_fit

__all__ = ["CutBatch", "MaskBlocks", "Split", "choose", "cut_batch", "heads_fit", "shape_of"]
