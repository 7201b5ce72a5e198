"""What the user asked for beside the layout."""

from dataclasses import dataclass

import torch

from .config import ParallelConfig
from .errors import ConfigError
from .memory_config import MemoryConfig
from .routing_config import RoutingConfig

MIXED_PRECISIONS = {"no": None, "bf16": torch.bfloat16}
"""What forward passes compute in: a name -> a type, over weights of whatever type they have."""


@dataclass(frozen=True)
class Options:
    """Checked when it is made.

    Attributes:
        mixed_precision: a key of :data:`MIXED_PRECISIONS`.
        routing: how tokens find their experts; ``None`` for the model's own way.
        memory: what is computed again instead of kept.

    Raises:
        ConfigError: one of them is unknown.
    """

    mixed_precision: str = "no"
    routing: RoutingConfig | None = None
    memory: MemoryConfig | None = None

    def __post_init__(self) -> None:
        if self.routing is not None and not isinstance(self.routing, RoutingConfig):
            raise ConfigError(
                f"routing={self.routing!r} is no such choice: pass hfscale.RoutingConfig(balance_loss=...)"
            )
        if self.memory is not None and not isinstance(self.memory, MemoryConfig):
            raise ConfigError(f"memory={self.memory!r} is no such choice: pass hfscale.MemoryConfig(recompute='full')")
        if self.mixed_precision not in MIXED_PRECISIONS:
            raise ConfigError(f"mixed_precision={self.mixed_precision!r} is unknown: use {', '.join(MIXED_PRECISIONS)}")

    def check_fits(self, layout: ParallelConfig) -> None:
        """Refuse, by :class:`ConfigError`, what a layout cannot do."""
        routing, size = self.routing, layout.size("cp")
        if size > 1 and routing is not None and (routing.capacity is not None or routing.draws):
            raise ConfigError(
                f"routing={routing} takes tokens in the order of the whole sequence, or draws for all of it, and each "
                f"of cp_size={size} ranks routes a part: use router='model' without capacity_factor, or cp_size=1"
            )
