"""Differentiable collectives, one per file: forward and backward on one screen."""

from .all_to_all import all_to_all, exchange_counts
from .enter import enter
from .gather import gather
from .gather_sum import gather_sum
from .grouped_linear import grouped_linear
from .head_cross_entropy import each_gradient_once, head_cross_entropy
from .head_rows import AnyRows, HeadRows, LinearRows
from .leave import leave
from .overlap import WeightLater, enter_overlapped, project
from .scatter import scatter
from .scatter_sum import scatter_sum
from .vocab_cross_entropy import VocabularySlice, vocab_cross_entropy

__all__ = [
    "AnyRows",
    "HeadRows",
    "LinearRows",
    "VocabularySlice",
    "WeightLater",
    "all_to_all",
    "each_gradient_once",
    "enter",
    "enter_overlapped",
    "exchange_counts",
    "gather",
    "gather_sum",
    "grouped_linear",
    "head_cross_entropy",
    "leave",
    "project",
    "scatter",
    "scatter_sum",
    "vocab_cross_entropy",
]
