"""The data axes: FSDP2 over ``dp_shard``, HSDP with ``dp_replicate``, applied last."""

from .shard import MIXED_PRECISIONS, apply_data_axes, install_shares, like_sharded, local_tensor, set_gradient_sync

__all__ = [
    "MIXED_PRECISIONS",
    "apply_data_axes",
    "install_shares",
    "like_sharded",
    "local_tensor",
    "set_gradient_sync",
]
