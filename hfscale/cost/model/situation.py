"""Describe the properties of a run that its memory depends on and its plan does not contain: the rank, the batch, and
measured activation bytes of layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...plan import ParameterPlan, Plan

Kind = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of a layer's parameters. Layers with equal names and shapes are assumed to keep equally many
activation bytes.
"""


@dataclass(frozen=True)
class Types:
    """Hold the bytes per value of a model's activations: inside blocks, between blocks, and in adapters."""

    size: int  # bytes per value within blocks
    adapters: int  # bytes per value of adapters' weights in their products
    # Bytes per value between blocks, if only autocast makes blocks compute in another dtype; 0: same as ``size``.
    autocasts: int = 0
    kept: float | None = None  # bytes per kept value of any dtype, if kept in 8 bits

    @property
    def stream(self) -> int:
        """Bytes of one value of the hidden states between blocks."""
        return self.autocasts or self.size

    def as_kept(self, size: float) -> float:
        """Return the bytes that a value of ``size`` bytes takes when a layer keeps it for the backward pass; fewer if
        activations are kept in 8 bits.
        """
        return size if self.kept is None else self.kept


@dataclass(frozen=True)
class LayerBytes:
    """Hold the activation bytes per token of one layer."""

    kept: float  # bytes that the layer keeps for its backward pass
    stream: float  # bytes of the input, kept if the layer is recomputed
    counted: bool  # whether the bytes are exact, not estimated from above
    again: float = 0.0  # bytes of its largest separately recomputed block, in its backward pass
    as_input: float = 0.0  # bytes of `kept` that are the layer's unchanged input
    piece: float = 0.0  # most bytes of `kept` that one operation of its backward pass reads
    # Most bytes of gradients that exist in addition, while the layer runs backward.
    passing: float = 0.0


@dataclass(frozen=True)
class MeasuredLayers:
    """Hold the activation bytes per token that were measured by running a model's layers, for one rank of a layout."""

    first: LayerBytes  # bytes of the first layer, whose input may need no gradient
    layers: Mapping[Kind, LayerBytes]  # bytes of all other layers, by kind
    shared: float  # memory that layers share: positions, masks
    before: float  # memory kept before the layers
    behind: float  # memory kept after the layers, without logits
    # The same measurements with layers that keep activations in 8 bits, if requested.
    in_8_bits: "MeasuredLayers | None" = None

    def of_layer(self, plan: Plan, layer: str) -> LayerBytes | None:
        """Return the measured bytes of a layer; ``None`` if no layer with the same parameter names and shapes was
        measured.
        """
        return self.first if layer == plan.layers[0] else self.layers.get(kind_of(plan, layer))


@dataclass(frozen=True)
class Situation:
    """Describe the properties of a run that its memory depends on and its plan does not contain: rank, tokens,
    microbatches in flight.
    """

    tokens: int  # tokens of one microbatch on one rank
    pp_rank: int = 0  # pipeline rank
    # Coordinates on the other axes; axes that are left out are 0.
    ranks: dict[str, int] = field(default_factory=dict)
    in_flight: tuple[int, ...] = ()  # microbatches that each stage holds at once; 1 by default
    mixed: str = "no"  # the ``mixed_precision``
    trained: frozenset[str] = frozenset()  # names of the parameters that train
    routes: int | None = None  # experts per token; None: all
    all_recomputed: bool = False  # whether all layers are recomputed, whatever the plan
    # Layers that are recomputed under a budget, if they are chosen already.
    chosen: frozenset[str] | None = None
    # Measured bytes of the model's own layers, for layers without a formula.
    measured: MeasuredLayers | None = None
    # Length of a sequence, which eager attention's scores depend on; ``None``: all tokens.
    sequence_length: int | None = None

    @property
    def length(self) -> int:
        """Number of tokens of a sequence."""
        return self.sequence_length or self.tokens

    def held_by(self, stage: int) -> int:
        """Return for how many microbatches the stage ``stage`` keeps activations at once."""
        return self.in_flight[stage] if stage < len(self.in_flight) else 1


def own_parameters(plan: Plan, layer: str) -> list[ParameterPlan]:
    """Return the parameters of a layer, without those of adapters."""
    adapters = {adapter.name for adapter in plan.adapters}
    return [planned for planned in plan.of_layers[layer] if planned.name not in adapters]


def kind_of(plan: Plan, layer: str) -> Kind:
    """Return the names and shapes of a layer's parameters, which are equal for layers that keep equally many bytes, in
    any layout.
    """
    owned = own_parameters(plan, layer)
    return tuple(
        sorted((planned.name.removeprefix(f"{layer}."), tuple(planned.shape)) for planned in owned)
    )
