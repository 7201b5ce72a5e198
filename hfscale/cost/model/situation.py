"""Describe what memory depends on besides the plan: rank, batch, and measured layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...plan import ParameterPlan, Plan

Kind = tuple[tuple[str, tuple[int, ...]], ...]
"""Names in a layer and shapes of its parameters: layers with the same ones keep as much."""


@dataclass(frozen=True)
class Types:
    """Hold the bytes per value of each tensor in a forward pass."""

    size: int  # within blocks
    adapters: int  # of adapters' factors, as they are multiplied
    # Between blocks, where autocast alone computes in another type within; 0: the same.
    autocasts: int = 0
    kept: float | None = None  # that a layer keeps, of whatever type, where it keeps them in 8 bits

    @property
    def stream(self) -> int:
        """Bytes of one value of the hidden states between blocks."""
        return self.autocasts or self.size

    def as_kept(self, size: float) -> float:
        """Return the bytes at which a layer keeps a value of ``size`` bytes."""
        return size if self.kept is None else self.kept


@dataclass(frozen=True)
class LayerBytes:
    """Hold the bytes that one layer keeps per token."""

    kept: float  # bytes for the backward pass
    stream: float  # bytes of its input alone, which is kept where activations are recomputed
    counted: bool  # and not estimated from above
    again: float = 0.0  # bytes that its largest block that is recomputed by itself keeps while that runs backward
    as_input: float = 0.0  # bytes of `kept` that are its input, as it was given
    piece: float = 0.0  # bytes of `kept` that its backward pass reads at once, at the most: those of one operation
    # Bytes of gradients that are there beside it, at the most, while it runs backward.
    passing: float = 0.0


@dataclass(frozen=True)
class MeasuredLayers:
    """Hold the measured bytes per token of a model's own layers, on one rank of a layout."""

    first: LayerBytes  # the first layer's, whose input may need no gradient; with those of the plan's first stage alone
    layers: Mapping[Kind, LayerBytes]  # any other layer's
    shared: float  # what layers keep of the same memory: positions, masks
    before: float  # what is kept in front of the layers
    behind: float  # behind them, without logits
    # The same where layers keep it in 8 bits, if that was asked for.
    in_8_bits: "MeasuredLayers | None" = None

    def of_layer(self, plan: Plan, layer: str) -> LayerBytes | None:
        """Return the bytes of a layer; ``None`` if no layer of its kind was measured."""
        return self.first if layer == plan.layers[0] else self.layers.get(kind_of(plan, layer))


@dataclass(frozen=True)
class Situation:
    """Describe a run as far as the plan does not: rank, tokens, schedule."""

    tokens: int  # of one microbatch on one rank
    pp_rank: int = 0  # whose stages are meant
    # Coordinates on the other axes; those left out are 0.
    ranks: dict[str, int] = field(default_factory=dict)
    in_flight: tuple[
        int, ...
    ] = ()  # for each stage, microbatches that it holds at once; 1 where it is not said
    mixed: str = "no"  # the ``mixed_precision``: how 16 bits compute over weights of another type
    trained: frozenset[str] = frozenset()  # names of the parameters that train
    routes: int | None = None  # experts that a token is sent to; None: all
    all_recomputed: bool = False  # whether all layers are, whatever the plan says
    # Layers that are recomputed under a budget, where that is known.
    chosen: frozenset[str] | None = None
    # What the model's own layers were seen to keep, where no formula says it.
    measured: MeasuredLayers | None = None
    # Of a sequence, which scores of eager attention are kept for; all tokens.
    sequence_length: int | None = None

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.sequence_length or self.tokens

    def held_by(self, stage: int) -> int:
        """Return how many microbatches a stage holds at once."""
        return self.in_flight[stage] if stage < len(self.in_flight) else 1


def own_parameters(plan: Plan, layer: str) -> list[ParameterPlan]:
    """Return the parameters of a layer, without those of adapters."""
    adapters = {adapter.name for adapter in plan.adapters}
    return [planned for planned in plan.of_layers[layer] if planned.name not in adapters]


def kind_of(plan: Plan, layer: str) -> Kind:
    """Return the kind of a layer, the same for every layout."""
    owned = own_parameters(plan, layer)
    return tuple(
        sorted((planned.name.removeprefix(f"{layer}."), tuple(planned.shape)) for planned in owned)
    )
