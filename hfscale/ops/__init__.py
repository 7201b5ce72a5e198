"""Differentiable collectives, one per file: forward and backward on one screen."""

from .enter import enter
from .gather import gather_last_dim
from .leave import leave
from .vocab_cross_entropy import vocab_cross_entropy

__all__ = ["enter", "gather_last_dim", "leave", "vocab_cross_entropy"]
