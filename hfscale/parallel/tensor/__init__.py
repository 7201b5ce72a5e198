"""Tensor parallelism: stock modules with local sizes inside the blocks, and collectives at the blocks' edges."""

from .part import (
    RandomStreams,
    TensorParallel,
    VocabularyLoss,
    cut_parameters,
    router_loss_counted_once,
    share_of_router_loss,
)
