"""What a parallelized model carries with it: its plan, its ranks, its parts, what runs it, and its names."""

from .objective import Objective, StepLoss
from .runtime import (
    Batch,
    Executor,
    Part,
    Runtime,
    find_runtime,
    local_tensor,
    recomputing,
    runtime_of,
)
from .shards import like_sharded, memory_of

__all__ = [
    "Batch",
    "Executor",
    "Objective",
    "Part",
    "Runtime",
    "StepLoss",
    "find_runtime",
    "like_sharded",
    "local_tensor",
    "memory_of",
    "recomputing",
    "runtime_of",
]
