"""Describe arguments that features add to a forward pass, in addition to the stock model's arguments."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchField:
    """Describe an argument that a feature adds to a forward pass, and removes before the stock model's own forward."""

    name: str
    token_dim: int  # the dim of the argument that indexes tokens, for sharding along the sequence
    is_target: bool = False  # whether it is read after the last layer, like labels
