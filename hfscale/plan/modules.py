"""Plan a model's modules: tensor-parallel blocks, regions cut along the sequence, mixtures of experts, adapters."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockPlan:
    """An attention or MLP module with collectives over the tensor axis at its edges.

    Fields are those of its role in the blueprint, with full module names.
    """

    name: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    shared: tuple[str, ...]
    local_attributes: tuple[tuple[str, int], ...]  # attribute, divisor of its value
    dropout: float
    enter: tuple[str, ...] = ()
    enter_inputs: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    heads: tuple[tuple[str, int], ...] = ()
    sample_heads: tuple[str, ...] = ()
    across: tuple[tuple[str, int], ...] = ()  # module, full width of its input
    local_config: tuple[tuple[str, int], ...] = ()  # field of the config, divisor of its value
    replicas: int = 1  # how many consecutive ranks hold each key/value head
    replicated: tuple[str, ...] = ()  # modules of the block that are replicated with them
    cut_from: str | None = None
    once: tuple[str, ...] = ()  # parameters that only one rank adds to the sum


@dataclass(frozen=True)
class SequencePlan:
    """One layer stack whose hidden states are cut along the sequence between blocks. Names are full module names.

    Attributes:
        owner: the module that calls the layers.
        exit: the module behind which the hidden states are full again: the norm behind the layers, or the owner.
        layers: the layers.
        gathered: modules in the layers that run on the full sequence.
        partial: modules with parameters of their own that see this rank's tokens only.
        direct: whether the embedding's output goes into the first layer, and nowhere else.
        dropout: whether the layers drop out activations.
    """

    owner: str
    exit: str
    layers: tuple[str, ...]
    gathered: tuple[str, ...]
    partial: tuple[str, ...]
    direct: bool
    dropout: bool


@dataclass(frozen=True)
class ExpertsPlan:
    """The experts of one mixture.

    Attributes:
        name: the module that holds them.
        count: how many there are.
        layer: the layer it is in; empty outside of the layers.
    """

    name: str
    count: int
    layer: str


@dataclass(frozen=True)
class AdapterParameter:
    """One parameter of an adapter, of the full model.

    Attributes:
        name: in the model with adapters.
        shape: the global shape.
        dtype: its type.
        base: the stock name of the parameter that it adapts, or is a copy of.
        kept_in: the attribute of the wrapper that holds it, ``lora_A`` say.
        transposed: whether ``base`` is stored as ``[in, out]``.
        experts: how many experts' parameters lie side by side in it; 0 if it belongs to one module.
        tied_to: the name of the parameter that it shares its tensor with.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    base: str
    kept_in: str
    transposed: bool = False
    experts: int = 0
    tied_to: str | None = None
