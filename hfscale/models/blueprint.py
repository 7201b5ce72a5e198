"""Define the blueprint of a family: the roles of an architecture's modules, as data.

A family is one :class:`Blueprint`. It comes from :data:`hfscale.models.FAMILIES` (hfscale's own table, keyed by
``config.model_type``); failing that, from the model's own Hugging Face ``base_model_tp_plan``, translated; failing
that, it is inferred from the model itself, and used if it is proved (:mod:`hfscale.extras.proofs.infer`): an
:class:`Inference`, also as JSON.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .fields import query_key_value

OWN_TABLE = "hfscale's own table"
TRANSLATED = "transformers' base_model_tp_plan, translated"
INFERRED = "inferred"  # what the words for it begin with
TOLERANCE = 1e-10  # largest difference of a proof, relative, in float64
_FUNCTIONS: dict[str, Callable[..., Any]] = {query_key_value.__name__: query_key_value}


@dataclass(frozen=True)
class Block:
    """Describe an attention or MLP module: its input is full, its output summed over the tensor ranks. Paths are
    relative to the block; the empty path is the block itself.
    """

    column: tuple[str, ...]  # projections that read the block's input; their outputs are cut
    row: tuple[str, ...]  # projections that write the block's output; their inputs are cut
    # modules whose first input is the block's input, where that is not the block (a family that adds the residual
    # inside the block must keep the residual out of the edges)
    enter: tuple[str, ...] = ("",)
    # keyword inputs of those modules that enter besides (an encoder's output, read by the keys and values of a cross
    # attention)
    enter_inputs: tuple[str, ...] = ()
    # modules whose output is the sum to be completed, where that is not the block; a block that has none of them
    # completes its own
    leave: tuple[str, ...] = ("",)
    # what is fused in a projection along the dim that is cut, side by side: how many equal matrices, or a function
    # from the config to their lengths
    parts: dict[str, int | Callable[[Any], tuple[int, ...]]] = field(default_factory=dict)
    # what holds key/value heads, and which of the matrices fused in it do (all, where empty): with fewer such heads
    # than ranks, these are cut so that several ranks hold the same head
    key_value: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {"k_proj": (), "v_proj": ()}
    )
    # modules used whole inside the block (per-head norms), whose gradients are therefore partial; the empty path
    # means the block's own parameters
    shared: tuple[str, ...] = ()
    # shared modules that compute over a whole width (a norm over all heads): their input, which is cut, is gathered
    # for them, and their output cut again
    across: tuple[str, ...] = ()
    # other parameters that are cut: along which dim, and how many matrices lie side by side in it (one matrix per
    # expert, say)
    cut: dict[str, tuple[int, int]] = field(default_factory=dict)
    # which of ``cut`` have entries that belong together two by two (gate and up interleaved)
    pairs: tuple[str, ...] = ()
    # whole parameters that are added to the block's output, where no projection does it (biases of experts)
    once: tuple[str, ...] = ()
    outside: tuple[
        str, ...
    ] = ()  # modules of the block that compute on what is whole (a norm behind ``leave``)
    # the block's own parameters have one entry per head along dim 0 (attention sinks), and are cut so
    own_heads: bool = False
    rest_shared: bool = False  # whatever else the block holds is used whole inside it (a router)
    # projections that a layer does not have are no mistake: layers of several kinds share the entry
    optional: bool = False
    # keyword inputs of the block with one entry per head along a dim: each rank gets its heads' share
    heads: dict[str, int] = field(default_factory=dict)
    # keyword inputs with one entry per sample and head along dim 0, sample by sample
    sample_heads: tuple[str, ...] = ()
    # Heads are laid out in that many groups side by side, each of which is cut.
    head_groups: int = 1
    local_attributes: tuple[
        str, ...
    ] = ()  # integer attributes that the forward reads as local sizes
    local_config: tuple[
        str, ...
    ] = ()  # config fields that the forward reads as local sizes, from ``self.config``
    # config fields that hold dropout probabilities applied to *cut* activations (attention weights)
    dropout: tuple[str, ...] = ("attention_dropout",)
    # where activations begin to be cut for the sake of dropout; by default where the first input enters
    cut_from: str | None = None


@dataclass(frozen=True)
class Blueprint:
    """Hold the roles of modules in one architecture. Paths are relative to the base model (``model.base_model``)."""

    # path of the layer list; several where there are several (an encoder and a decoder, two towers). A class need not
    # have all of them: ``BartForCausalLM`` has the decoder's only
    layers: str | tuple[str, ...]
    # Path of each block inside a layer -> its roles. A layer need not have all of them.
    blocks: dict[str, Block]
    # what in a config (of some members of the family) the blocks do not describe, in words, or ``None``
    unfit: Callable[[Any], str | None] = lambda config: None
    # the part of a model's config that functions of the blueprint are given, and whose fields it names
    config_of: Callable[[Any], Any] = lambda config: config
    source: str = OWN_TABLE  # where the blueprint comes from, in words

    @property
    def layer_lists(self) -> tuple[str, ...]:
        """The paths of all layer lists."""
        return (self.layers,) if isinstance(self.layers, str) else self.layers


def in_layers(
    layers: str, unfit: Callable[[Any], str | None] = Blueprint.unfit, **blocks: Block
) -> Blueprint:
    """Return the blueprint of one layer list, whose blocks are children of its layers."""
    return Blueprint(layers, blocks, unfit)


@dataclass(frozen=True)
class Proof:
    """Hold the differences found when a blueprint was proved on a clone."""

    output: float  # largest difference of the output, relative to its largest entry
    gradient: float  # largest difference of a gradient, likewise
    parameter: str  # whose gradient that is

    @property
    def worst(self) -> float:
        """The larger of both differences."""
        return max(self.output, self.gradient)


@dataclass(frozen=True)
class Inference:
    """Hold an inferred blueprint and its evidence."""

    blueprint: Blueprint  # the roles found
    proof: Proof  # two ranks against one process, on a tiny clone
    attention: tuple[str, ...]  # paths of the blocks that mix tokens
    whole: tuple[str, ...]  # why other parts of the layers are not cut


def as_data(found: Inference) -> dict[str, Any]:
    """Return an inference as JSON."""
    return {
        "layers": found.blueprint.layers,
        "source": found.blueprint.source,
        "blocks": {path: block_as_data(block) for path, block in found.blueprint.blocks.items()},
        "proof": asdict(found.proof),
        "attention": list(found.attention),
        "whole": list(found.whole),
    }


def given_fields(block: Block) -> dict[str, Any]:
    """Return the fields of a block that differ from their defaults."""
    return {name: value for name, value in vars(block).items() if value != _DEFAULTS[name]}


def block_as_data(block: Block) -> dict[str, Any]:
    """Return the given fields of a block as JSON; functions by name."""
    return {name: _named(value) for name, value in given_fields(block).items()}


def from_data(data: dict[str, Any]) -> Inference:
    """Return the inference that :func:`as_data` wrote."""
    blocks = {
        path: Block(
            **{
                "column": (),
                "row": (),
                **{name: _unnamed(name, value) for name, value in block.items()},
            }
        )
        for path, block in data["blocks"].items()
    }
    blueprint = Blueprint(_tuples(data["layers"]), blocks, source=data["source"])
    return Inference(
        blueprint, Proof(**data["proof"]), tuple(data["attention"]), tuple(data["whole"])
    )


# These two are always given.
_DEFAULTS = {
    **vars(Block(column=(), row=())),
    "column": None,
    "row": None,
}


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _named(each) for name, each in value.items()}
    return value.__name__ if callable(value) else value


def _unnamed(name: str, value: Any) -> Any:
    if name == "parts":
        return {
            path: _FUNCTIONS[each] if isinstance(each, str) else _tuples(each)
            for path, each in value.items()
        }
    return (
        {path: _tuples(each) for path, each in value.items()}
        if isinstance(value, dict)
        else _tuples(value)
    )


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
