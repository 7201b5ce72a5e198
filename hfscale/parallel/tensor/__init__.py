"""Tensor parallelism: blocks of ordinary local modules, with collectives at their edges."""

from .part import (
    RandomStreams,
    TensorParallel,
    VocabularyLoss,
    cut_parameters,
    router_loss_counted_once,
    share_of_router_loss,
)
