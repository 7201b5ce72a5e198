"""Compute the lengths of matrices fused in one projection, from a config."""

from typing import Any


def query_key_value(config: Any) -> tuple[int, ...]:
    """Return the lengths of queries, keys and values side by side."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_heads = config.num_key_value_heads
    return config.num_attention_heads * head_dim, key_heads * head_dim, key_heads * head_dim
