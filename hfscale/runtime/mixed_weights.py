"""Where weights are copied for mixed precision."""

from .runtime import Runtime


def shares_casts(runtime: Runtime) -> bool:
    """Whether microbatches under way in stages compute with one copy of each weight, of mixed precision's type. Data
    ranks cast what they gather instead.
    """
    mixed = runtime.options.mixed_precision != "no"
    return mixed and runtime.plan.stages is not None and runtime.mesh.data_world == 1
