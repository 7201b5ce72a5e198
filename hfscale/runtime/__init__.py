"""What a parallelized model carries with it: its plan, its ranks, what runs it, and its names."""

from .runtime import Runtime, find_runtime, like_sharded, local_tensor, recomputing, runtime_of

__all__ = ["Runtime", "find_runtime", "like_sharded", "local_tensor", "recomputing", "runtime_of"]
