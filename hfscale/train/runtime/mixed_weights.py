"""Decide which component casts weights for mixed precision."""

from .runtime import Runtime


def shares_casts(runtime: Runtime) -> bool:
    """Return whether the microbatches in flight in pipeline stages share one low-precision copy of each weight. With
    data ranks FSDP2 casts the weights it gathers instead.
    """
    mixed = runtime.options.mixed_precision != "no"
    return mixed and runtime.plan.stages is not None and runtime.mesh.data_world == 1
