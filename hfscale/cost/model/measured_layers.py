"""What layers of a model's own class were seen to keep, where there is no formula: data that estimates read."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...plan.plan import Plan
from .layer_bytes import LayerBytes, own_parameters

Kind = tuple[tuple[str, tuple[int, ...]], ...]
"""Names in a layer and shapes of its parameters: layers with the same ones keep as much."""


@dataclass(frozen=True)
class MeasuredLayers:
    """Bytes of a token, on one rank of a layout."""

    first: LayerBytes  # the first layer's, whose input may need no gradient; with those of the plan's first stage alone
    layers: Mapping[Kind, LayerBytes]  # any other layer's
    shared: float  # what layers keep of the same memory: positions, masks
    before: float  # what is kept in front of the layers
    behind: float  # behind them, without logits
    in_8_bits: "MeasuredLayers | None" = (
        None  # the same where layers keep what they do in 8 bits, if that was asked for
    )

    def of_layer(self, plan: Plan, layer: str) -> LayerBytes | None:
        """Return what a layer keeps; ``None`` of a kind that was not seen."""
        if layer == plan.layers[0]:
            return self.first
        return self.layers.get(kind_of(plan, layer))


def kind_of(plan: Plan, layer: str) -> Kind:
    """Return the kind of a layer, whatever the layout."""
    owned = own_parameters(plan, layer)
    return tuple(sorted((planned.name.removeprefix(f"{layer}."), tuple(planned.shape)) for planned in owned))
