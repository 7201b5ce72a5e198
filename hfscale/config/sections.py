"""Define the recipe sections ``routing``, ``memory`` and ``float8``, which become arguments of the model."""

from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .float8 import Float8Config
from .memory import MemoryConfig
from .routing import RoutingConfig

SECTIONS: dict[str, type] = {
    "routing": RoutingConfig,
    "memory": MemoryConfig,
    "float8": Float8Config,
}
"""Map each recipe section, which is also an argument of :func:`hfscale.from_pretrained`, to the class of its fields."""

ESTIMATED_PRECISIONS = ("no", "bf16", "bf16_params", "fp8")
"""Values of ``mixed_precision`` for which bytes and seconds can be estimated without a GPU."""


@dataclass
class OptionSections:
    """Hold the recipe sections that become arguments of the model; the keys of each section are the fields of its
    class.

    Attributes:
        routing: router and load balancing of MoE layers, :class:`hfscale.RoutingConfig`.
        memory: recomputation, offloading and compression, :class:`hfscale.MemoryConfig`.
        float8: options of ``training.mixed_precision=fp8``, :class:`hfscale.Float8Config`.
    """

    routing: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    float8: dict[str, Any] = field(default_factory=dict)

    def sections(self, mixed_precision: str) -> dict[str, Any]:
        """Return the arguments of :func:`hfscale.from_pretrained` that these sections set. Raise :class:`ConfigError`
        if ``float8`` is set and ``mixed_precision`` is not ``"fp8"``.
        """
        if self.float8 and mixed_precision != "fp8":
            raise ConfigError(
                f"float8 needs training.mixed_precision=fp8, got {mixed_precision}: set "
                "training.mixed_precision=fp8, or leave float8 out"
            )
        return {
            name: kind(**given) for name, kind in SECTIONS.items() if (given := getattr(self, name))
        }
