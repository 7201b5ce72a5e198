"""What layers of a model's own class were seen to keep, where there is no formula: data that estimates read."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...plan.plan import Plan
from .layer_bytes import LayerBytes

Kind = tuple[tuple[str, tuple[int, ...]], ...]
"""Names in a layer and shapes of its parameters: layers with the same ones keep as much."""


@dataclass(frozen=True)
class MeasuredLayers:
    """Bytes of a token, on one rank of a layout.

    Attributes:
        first: what the first layer keeps, whose input may need no gradient; with those of the plan's first stage alone.
        layers: what any other layer of a kind keeps.
        shared: what layers keep of the same memory: positions, masks.
        before: what is kept in front of the layers; ``behind``: behind them, without logits.
        in_8_bits: the same where layers keep what they do in 8 bits, if that was asked for.
    """

    first: LayerBytes
    layers: Mapping[Kind, LayerBytes]
    shared: float
    before: float
    behind: float
    in_8_bits: "MeasuredLayers | None" = None

    def of_layer(self, plan: Plan, layer: str) -> LayerBytes | None:
        """What a layer keeps; ``None`` of a kind that was not seen."""
        if layer == plan.layers[0]:
            return self.first
        return self.layers.get(kind_of(plan, layer))


def kind_of(plan: Plan, layer: str) -> Kind:
    """The kind of a layer, whatever the layout."""
    adapters, start = {adapter.name for adapter in plan.adapters}, f"{layer}."
    owned = (p for p in plan.of_layers[layer] if p.name not in adapters)
    return tuple(sorted((planned.name.removeprefix(start), tuple(planned.shape)) for planned in owned))
