"""Optimizers over shards: HF Trainer's names, each with the update that one process would make."""

from .factory import create_optimizer
from .sharded import ShardedOptimizer

__all__ = ["ShardedOptimizer", "create_optimizer"]
