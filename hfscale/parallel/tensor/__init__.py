"""Tensor parallelism: blocks of ordinary local modules whose edges talk."""

from .apply import cut_parameters
from .loss import VocabParallelLoss
from .part import RandomStreams, TensorParallel, VocabularyLoss

__all__ = ["RandomStreams", "TensorParallel", "VocabParallelLoss", "VocabularyLoss", "cut_parameters"]
