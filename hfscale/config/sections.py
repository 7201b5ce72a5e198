"""Define the options that are recipe sections of several fields each."""

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
"""Argument of :func:`hfscale.from_pretrained` -> the class whose fields are the keys of its section."""

ESTIMATED_PRECISIONS = ("no", "bf16", "bf16_params", "fp8")
"""Values of ``mixed_precision`` whose bytes and seconds are estimated without a GPU."""


@dataclass
class OptionSections:
    """Hold the recipe sections that are arguments of the model; keys are the fields of their classes.

    Attributes:
        routing: what a mixture's router is to do besides, :class:`hfscale.RoutingConfig`.
        memory: what is computed again instead of kept, or kept on the host, :class:`hfscale.MemoryConfig`.
        float8: how ``training.mixed_precision=fp8`` computes, :class:`hfscale.Float8Config`.
    """

    routing: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    float8: dict[str, Any] = field(default_factory=dict)

    def sections(self, mixed_precision: str) -> dict[str, Any]:
        """Return the model arguments that the sections set; raise :class:`ConfigError` for those without meaning."""
        if self.float8 and mixed_precision != "fp8":
            raise ConfigError(
                "float8 needs training.mixed_precision=fp8: set that, or leave it out"
            )
        return {
            name: kind(**given) for name, kind in SECTIONS.items() if (given := getattr(self, name))
        }
