"""Names by which transformers calls the cache of keys and values."""

CACHES = frozenset({"cache", "past_key_values", "past_key_value", "layer_past"})
"""Names of arguments that are such a cache: ``cache`` since transformers 5.24."""

CACHE_LENGTHS = frozenset({"cache_length", "past_key_values_length"})
"""Names of arguments that say how many tokens such a cache holds: the first since transformers 5.24."""
