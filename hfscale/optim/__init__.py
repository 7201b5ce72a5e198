"""Optimizers over shards, by HF Trainer's names, each with the update of one process."""

from .factory import create_optimizer
from .sharded import ShardedOptimizer

__all__ = ["ShardedOptimizer", "create_optimizer"]
