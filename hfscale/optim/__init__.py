"""Update sharded parameters by optimizers with HF Trainer's names; each update equals that of one process."""

from .factory import create_optimizer
from .sharded import ShardedOptimizer
