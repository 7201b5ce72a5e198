"""The data axes: FSDP2 over ``dp_shard``, HSDP with ``dp_replicate``, applied last."""

from .part import DataParallel
from .shard import apply_data_axes, install_local_weights, one_reduction, reshard, set_gradient_sync

__all__ = [
    "DataParallel",
    "apply_data_axes",
    "install_local_weights",
    "one_reduction",
    "reshard",
    "set_gradient_sync",
]
