"""The data axes: FSDP2 over ``dp_shard``, HSDP with ``dp_replicate``, applied last."""

from ...runtime import local_tensor
from ._fsdp import add_up_gradients
from .shard import (
    MIXED_PRECISIONS,
    apply_data_axes,
    install_local_weights,
    one_reduction,
    reduce_microbatch,
    reshard,
    set_gradient_sync,
)

__all__ = [
    "MIXED_PRECISIONS",
    "add_up_gradients",
    "apply_data_axes",
    "install_local_weights",
    "local_tensor",
    "one_reduction",
    "reduce_microbatch",
    "reshard",
    "set_gradient_sync",
]
