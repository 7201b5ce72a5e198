"""Update sharded parameters by optimizers with HF Trainer's names. Each update equals the update of one process."""

from .factory import create_optimizer
from .sharded import ShardedOptimizer
