"""Describe what features add to the arguments of a forward pass, beside what the stock model takes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchField:
    """An argument of a pass that a feature adds, and takes out again before the stock model is called."""

    name: str
    token_dim: int  # the dim along which its tokens lie, where ranks hold parts of a sequence
    is_target: bool = False  # whether it is read behind the last layer, as labels are
