"""Define the options that are recipe sections with several fields."""

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
"""Argument of :func:`hfscale.from_pretrained` -> the class whose fields are the keys of the recipe section."""

ESTIMATED_PRECISIONS = ("no", "bf16", "bf16_params", "fp8")
"""Values of ``mixed_precision`` for which bytes and seconds can be estimated without a GPU."""


@dataclass
class OptionSections:
    """Hold the recipe sections that become arguments of the model; keys are the fields of the classes.

    Attributes:
        routing: router and load balancing of MoE layers, :class:`hfscale.RoutingConfig`.
        memory: recomputation, offloading and compression, :class:`hfscale.MemoryConfig`.
        float8: options of ``training.mixed_precision=fp8``, :class:`hfscale.Float8Config`.
    """

    routing: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    float8: dict[str, Any] = field(default_factory=dict)

    def sections(self, mixed_precision: str) -> dict[str, Any]:
        """Return the model arguments that the sections set. Raise :class:`ConfigError` for a section that has no effect
        with ``mixed_precision``.
        """
        if self.float8 and mixed_precision != "fp8":
            raise ConfigError(
                f"float8 needs training.mixed_precision=fp8, got {mixed_precision}: set "
                "training.mixed_precision=fp8, or leave float8 out"
            )
        return {
            name: kind(**given) for name, kind in SECTIONS.items() if (given := getattr(self, name))
        }
