"""Names by which transformers calls the cache of keys and values."""

CACHES = frozenset({"cache", "past_key_values", "past_key_value", "layer_past"})
"""Names of arguments that are a cache of keys and values; ``cache`` is the name since transformers 5.24."""

CACHE_LENGTHS = frozenset({"cache_length", "past_key_values_length"})
"""Names of arguments that are the number of cached tokens; ``cache_length`` is the name since transformers 5.24."""
