"""List families whose layers pass states to another model's layers in a cache, instead of returning them."""

READ_BY_CACHE = ("pi0",)
"""Backward passes come to such layers by keys and values. FSDP2 gathers weights again where a gradient of what a layer
returned arrives, so data ranks keep those of these families from the forward pass on."""
