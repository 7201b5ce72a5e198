"""What becomes of the modules of a model: blocks, the streams between them, mixtures of experts, adapters."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockPlan:
    """One attention or MLP module whose edges talk over the tensor axis. Names are full module names."""

    name: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    shared: tuple[str, ...]
    local_attributes: tuple[tuple[str, int], ...]  # with what their values are divided by
    dropout: float
    enter: tuple[str, ...] = ()
    enter_inputs: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    heads: tuple[tuple[str, int], ...] = ()
    sample_heads: tuple[str, ...] = ()
    across: tuple[tuple[str, int], ...] = ()  # with the whole width of the input
    local_config: tuple[tuple[str, int], ...] = ()  # likewise
    replicas: int = 1  # how many consecutive ranks hold each key/value head
    replicated: tuple[str, ...] = ()  # what of the block they hold replicas of, where there are several
    cut_from: str | None = None
    once: tuple[str, ...] = ()  # parameters that one rank adds to the sum


@dataclass(frozen=True)
class SequencePlan:
    """The stream of one layer stack, cut along the sequence between blocks. Names are full module names.

    Attributes:
        owner: the module that calls the layers.
        exit: the module whose output is the whole stream again: the norm behind the layers, or the owner.
        layers: the layers.
        gathered: modules in the layers that are run on the whole sequence.
        partial: modules with parameters of their own that see this rank's tokens only.
        direct: what the embedding returns goes into the first layer, and nowhere else.
        dropout: something in the layers drops activations out.
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
    """One parameter of an adapter, of the whole model.

    Attributes:
        name: in the model with adapters.
        shape: of the whole parameter.
        dtype: its type.
        base: the stock name of the parameter that it adapts, or is a copy of.
        kept_in: the attribute of the wrapper that holds it, ``lora_A`` say.
        transposed: ``base`` is stored as ``[in, out]``.
        experts: how many experts' parameters lie side by side in it; 0 where it is of one module.
        tied_to: the name of the parameter it is the same tensor as.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    base: str
    kept_in: str
    transposed: bool = False
    experts: int = 0
    tied_to: str | None = None
