"""Tensor parallelism: blocks of ordinary local modules whose edges talk."""

from .apply import cut_parameters, install_edges
from .generate import install_generate
from .loss import VocabParallelLoss, install_loss

__all__ = ["VocabParallelLoss", "cut_parameters", "install_edges", "install_generate", "install_loss"]
