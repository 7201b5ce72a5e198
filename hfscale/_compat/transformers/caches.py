"""Names by which transformers calls the cache of keys and values."""

CACHES = frozenset({"cache", "past_key_values", "past_key_value", "layer_past"})
"""Names of arguments that are such a cache: ``cache`` since transformers 5.24."""
