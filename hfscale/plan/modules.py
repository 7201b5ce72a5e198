"""Define the entries of a plan that describe a model's modules: tensor-parallel attention and MLP modules, layers with
sequence parallelism, MoE layers, and parameters of adapters.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BlockPlan:
    """Describe how one attention or MLP module is tensor-parallel: its column- and row-parallel projections, and the
    collectives at its input and output.

    Fields without a comment mean the same as in :class:`hfscale.models.blueprint.Block`, but name modules by their full
    names in the model.
    """

    name: str
    column: tuple[str, ...]
    row: tuple[str, ...]
    shared: tuple[str, ...]
    local_attributes: tuple[tuple[str, int], ...]  # attribute, divisor of the attribute's value
    dropout: float
    enter: tuple[str, ...] = ()
    enter_inputs: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    heads: tuple[tuple[str, int], ...] = ()
    sample_heads: tuple[str, ...] = ()
    across: tuple[tuple[str, int], ...] = ()  # module, full width of the module's input
    # Field of the config, divisor of the field's value
    local_config: tuple[tuple[str, int], ...] = ()
    replicas: int = 1  # number of consecutive ranks that hold the same key/value head
    # Modules of the block that are replicated with the key/value heads
    replicated: tuple[str, ...] = ()
    cut_from: str | None = None
    once: tuple[str, ...] = ()  # parameters (biases) that only one rank adds to the sum over ranks


@dataclass(frozen=True)
class SequencePlan:
    """Describe a stack of layers under sequence parallelism: between their attention and MLP modules, hidden states are
    sharded along the sequence over tensor ranks. Fields name modules by their full names in the model.
    """

    owner: str  # the module that calls the layers
    # the module after which hidden states are gathered: the norm after the layers, or the owner
    exit: str
    layers: tuple[str, ...]  # the layers
    gathered: tuple[str, ...]  # modules in the layers that run on the full sequence
    # modules with their own parameters that get only this rank's tokens, so their gradients are partial
    partial: tuple[str, ...]
    # Whether the embedding's output is the first layer's input, and is used nowhere else
    direct: bool
    dropout: bool  # whether the layers apply dropout to hidden states

    @property
    def alone(self) -> bool:
        """Return whether the stack is a single layer that shards its own input and gathers its own output. Such a layer
        gets and returns the hidden states of all tokens, on every pipeline stage.
        """
        return self.layers == (self.owner,)


@dataclass(frozen=True)
class ExpertsPlan:
    """Describe the experts of one MoE layer in a plan: the module that holds them, and their number."""

    name: str  # the module that holds the experts
    count: int  # number of experts, over all ranks
    layer: str  # the layer that contains the module; empty if no layer does


@dataclass(frozen=True)
class AdapterParameter:
    """Describe one parameter of a PEFT adapter in a plan: its full shape, and the stock parameter that it adapts."""

    name: str  # name in the model with adapters
    shape: tuple[int, ...]  # the global shape
    dtype: torch.dtype
    # Stock name of the parameter that this parameter adapts, or of which it is a trained copy
    base: str
    kept_in: str  # attribute of PEFT's wrapper that holds the parameter, for example ``lora_A``
    transposed: bool = False  # whether ``base`` is stored as ``[in, out]``
    # number of experts whose parameters lie side by side in this parameter; 0 if the parameter belongs to one module
    experts: int = 0
    tied_to: str | None = None  # the name of another parameter that is the same tensor
    tokens: tuple[int, ...] = ()  # the rows of ``base`` that the rows of this parameter replace
    adapter: str = "default"  # PEFT's name of the adapter

    @property
    def first_name(self) -> str:
        """The name under which plans, shards and saves know the tensor, which may have several names."""
        return self.tied_to or self.name

    @property
    def module(self) -> str:
        """The name of the module that holds :attr:`base`."""
        return self.base.rpartition(".")[0]
