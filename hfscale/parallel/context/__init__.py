"""Context parallelism: ranks have parts of the same sequences, and attention alone reads the others'."""

from .part import ContextParallel

__all__ = ["ContextParallel"]
