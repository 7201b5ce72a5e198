"""What bitsandbytes' optimizers are and what they keep, as a table: read by estimates and by those who build them.

8-bit optimizers keep a moment in one byte per entry, and a scale for each block of entries (Dettmers et al. 2022).
"""

from dataclasses import dataclass

BLOCK = 256
"""Entries that share a scale in 8-bit states."""
MIN_8BIT_SIZE = 4096
"""bitsandbytes' default: states of tensors with fewer entries have 32 bits."""

MOMENTS = {"AdamW": (2, 2), "Adam": (2, 2), "AdEMAMix": (3, 2), "Lion": (1, 1), "RMSprop": (1, 1)}
"""Classes -> moments per entry, and tables of 8-bit values."""


@dataclass(frozen=True)
class BitsAndBytesOptimizer:
    """What a name stands for.

    Attributes:
        stock: the class in bitsandbytes.
        bits: of its state.
        paged: whether the state may be moved out of a GPU that is full.
    """

    stock: str
    bits: int
    paged: bool = False


BITSANDBYTES = {
    "adam_8bit": BitsAndBytesOptimizer("Adam", 8),
    "adamw_8bit": BitsAndBytesOptimizer("AdamW", 8),
    "adamw_bnb_8bit": BitsAndBytesOptimizer("AdamW", 8),
    "paged_adamw_8bit": BitsAndBytesOptimizer("AdamW", 8, paged=True),
    "paged_adamw_32bit": BitsAndBytesOptimizer("AdamW", 32, paged=True),
    "ademamix": BitsAndBytesOptimizer("AdEMAMix", 32),
    "ademamix_8bit": BitsAndBytesOptimizer("AdEMAMix", 8),
    "paged_ademamix_8bit": BitsAndBytesOptimizer("AdEMAMix", 8, paged=True),
    "paged_ademamix_32bit": BitsAndBytesOptimizer("AdEMAMix", 32, paged=True),
    "lion_8bit": BitsAndBytesOptimizer("Lion", 8),
    "lion_32bit": BitsAndBytesOptimizer("Lion", 32),
    "paged_lion_8bit": BitsAndBytesOptimizer("Lion", 8, paged=True),
    "paged_lion_32bit": BitsAndBytesOptimizer("Lion", 32, paged=True),
    "rmsprop_bnb": BitsAndBytesOptimizer("RMSprop", 32),
    "rmsprop_bnb_8bit": BitsAndBytesOptimizer("RMSprop", 8),
    "rmsprop_bnb_32bit": BitsAndBytesOptimizer("RMSprop", 32),
}
"""Optimizers of bitsandbytes by the names that HF Trainer has for them, and ``adam_8bit``."""
