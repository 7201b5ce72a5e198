"""Plan a model's modules: tensor-parallel blocks, regions cut along the sequence, mixtures of experts, adapters."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockPlan:
    """Plan of an attention or MLP module with collectives at its edges: the fields of its role, with full names."""

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
    """Plan of one layer stack whose hidden states are cut along the sequence. Names are full module names."""

    owner: str  # the module that calls the layers
    exit: str  # the module behind which the hidden states are full again: the norm behind the layers, or the owner
    layers: tuple[str, ...]  # the layers
    gathered: tuple[str, ...]  # modules in the layers that run on the full sequence
    # Modules with parameters of their own that see this rank's tokens only.
    partial: tuple[str, ...]
    direct: bool  # whether the embedding's output goes into the first layer, and nowhere else
    dropout: bool  # whether the layers drop out activations

    @property
    def alone(self) -> bool:
        """Return whether it is one layer that gets and returns all tokens, on whichever stage it is."""
        return self.layers == (self.owner,)


@dataclass(frozen=True)
class ExpertsPlan:
    """Plan of the experts of one mixture."""

    name: str  # the module that holds them
    count: int  # how many there are
    layer: str  # the layer it is in; empty outside of the layers


@dataclass(frozen=True)
class AdapterParameter:
    """Hold one parameter of an adapter, as in the full model."""

    name: str  # in the model with adapters
    shape: tuple[int, ...]  # the global shape
    dtype: torch.dtype  # its type
    base: str  # the stock name of the parameter that it adapts, or is a copy of
    kept_in: str  # the attribute of the wrapper that holds it, ``lora_A`` say
    transposed: bool = False  # whether ``base`` is stored as ``[in, out]``
    # How many experts' parameters lie side by side in it; 0 if it belongs to one module.
    experts: int = 0
    tied_to: str | None = None  # the name of the parameter that it shares its tensor with
    tokens: tuple[int, ...] = ()  # the rows of ``base`` that it replaces, one by one
    adapter: str = "default"  # PEFT's name of the adapter that it is of
