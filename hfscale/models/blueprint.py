"""Define the blueprint of a family: data that names an architecture's layer list, its blocks (attention, MLP), and the
blocks' column- and row-parallel projections; and blocks that several families share.

A family has one :class:`Blueprint`, from the first of these sources that has one:

1. :data:`hfscale.models.FAMILIES`, hfscale's own table, keyed by ``config.model_type``;
2. transformers' ``base_model_tp_plan`` of the model, translated;
3. the structure of the model itself, from which :mod:`hfscale.extras.proofs.infer` derives a blueprint. Such an
   *inferred* blueprint (:class:`Inference`) is used only if two tensor ranks that run it give the results of one
   process. It can be written as JSON.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .fields import query_key_value

OWN_TABLE = "hfscale's own table"
TRANSLATED = "transformers' base_model_tp_plan, translated"
INFERRED = "inferred"  # beginning of the ``source`` of an inferred blueprint
# Largest relative difference, in float64, with which an inferred blueprint counts as proved
TOLERANCE = 1e-10
_FUNCTIONS: dict[str, Callable[..., Any]] = {query_key_value.__name__: query_key_value}


@dataclass(frozen=True)
class Block:
    """Describe a tensor-parallel block: an attention or MLP module whose input is full on every tensor rank, and whose
    output is summed over the tensor ranks. Paths are relative to the block; the empty path is the block itself.
    """

    column: tuple[str, ...]  # projections that read the block's input; their outputs are sharded
    row: tuple[str, ...]  # projections that write the block's output; their inputs are sharded
    # modules whose first input is the block's input, if not the block itself. Example: a block that adds the residual
    # inside; the residual must not pass through the collective at the block's input
    enter: tuple[str, ...] = ("",)
    # keyword inputs of the modules ``enter`` that are full inputs of the block too. Example: the encoder's output,
    # which keys and values of a cross-attention read
    enter_inputs: tuple[str, ...] = ()
    # modules whose output must be summed over tensor ranks, if not the block itself. In a block that has none
    # of these modules, the block's output is summed
    leave: tuple[str, ...] = ("",)
    # projection -> the matrices that are fused in it, side by side along the sharded dim: the number of equal matrices,
    # or a function from the config to their lengths
    parts: dict[str, int | Callable[[Any], tuple[int, ...]]] = field(default_factory=dict)
    # module with key/value heads -> indices of the fused matrices that hold them; empty: all matrices. If there are
    # fewer key/value heads than ranks, several ranks hold the same head of these matrices
    key_value: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {"k_proj": (), "v_proj": ()}
    )
    # modules that are not sharded but read sharded activations inside the block (per-head norms), so their gradients
    # are partial; the empty path means the block's own parameters
    shared: tuple[str, ...] = ()
    # shared modules that compute over the full width (a norm over all heads): their sharded input is gathered, and
    # their output is sharded again
    across: tuple[str, ...] = ()
    # further sharded parameter -> (dim, number of matrices side by side along this dim), for example matrices of
    # experts
    cut: dict[str, tuple[int, int]] = field(default_factory=dict)
    # parameters in ``cut`` whose neighbouring entries belong together in pairs (gate and up interleaved)
    pairs: tuple[str, ...] = ()
    # unsharded parameters that are added to the block's output outside of projections (biases of experts): only one
    # rank may add them
    once: tuple[str, ...] = ()
    # modules of the block that compute on full activations (a norm after ``leave``)
    outside: tuple[str, ...] = ()
    # the block's own parameters have one entry per head along dim 0 (attention sinks), and are sharded along dim 0
    own_heads: bool = False
    rest_shared: bool = False  # all other modules of the block are ``shared`` (a router)
    # layers may lack some of the projections, since layers of several kinds use this entry
    optional: bool = False
    # keyword input of the block -> its dim with one entry per head; each rank gets the entries of its heads
    heads: dict[str, int] = field(default_factory=dict)
    # keyword inputs whose dim 0 has one entry per sample and head, ordered by sample
    sample_heads: tuple[str, ...] = ()
    # number of groups of heads that lie side by side; each group is sharded
    head_groups: int = 1
    # integer attributes that the forward reads as local sizes
    local_attributes: tuple[str, ...] = ()
    # fields of ``self.config`` that the forward reads as local sizes
    local_config: tuple[str, ...] = ()
    # config fields with dropout probabilities that are applied to *sharded* activations (attention weights)
    dropout: tuple[str, ...] = ("attention_dropout",)
    # the first module that computes sharded activations, for dropout's random numbers; ``None``: the first of ``enter``
    cut_from: str | None = None


def plain_mlp(column: str, row: str, **fields: Any) -> Block:
    """Return an MLP of the projections ``column`` and ``row``, without dropout between them; ``fields`` are further
    fields of :class:`Block`.
    """
    return Block((column,), (row,), dropout=(), **fields)


# The attention and the MLP of LLaMA and of similar families
LLAMA_ATTENTION = Block(column=("q_proj", "k_proj", "v_proj"), row=("o_proj",))
LLAMA_MLP = Block(column=("gate_proj", "up_proj"), row=("down_proj",), dropout=())
# Separate queries, keys and values, and another name of the output's projection
OUT_PROJ_ATTENTION = Block(column=("q_proj", "k_proj", "v_proj"), row=("out_proj",))
# An MLP of two projections
FC_MLP = plain_mlp("fc1", "fc2")
# An MLP whose two projections are children of the layer
FLAT_MLP = Block(
    column=("fc1",), row=("fc2",), enter=("fc1",), leave=("fc2",), dropout=("activation_dropout",)
)


@dataclass(frozen=True)
class Blueprint:
    """Describe one architecture: its layer list, and its blocks (attention, MLP) with their column- and row-parallel
    projections. Paths are relative to the base model (``model.base_model``).
    """

    # path of the layer list, or several paths (an encoder and a decoder, two towers). A class may lack some lists:
    # ``BartForCausalLM`` has only the decoder's
    layers: str | tuple[str, ...]
    # path of a block inside a layer -> the block. A layer may lack some blocks
    blocks: dict[str, Block]
    # returns, in words, a feature of the config that the blocks do not describe; ``None`` if the config fits
    unfit: Callable[[Any], str | None] = lambda config: None
    # returns the part of a model's config whose fields the blueprint names and its functions receive
    config_of: Callable[[Any], Any] = lambda config: config
    source: str = OWN_TABLE  # where the blueprint comes from, in words

    @property
    def layer_lists(self) -> tuple[str, ...]:
        """The paths of all layer lists."""
        return (self.layers,) if isinstance(self.layers, str) else self.layers


def in_layers(
    layers: str, unfit: Callable[[Any], str | None] = Blueprint.unfit, **blocks: Block
) -> Blueprint:
    """Return the blueprint of a model with one layer list ``layers``. Each keyword argument is the name of a child
    module of every layer, and the child's :class:`Block`.
    """
    return Blueprint(layers, blocks, unfit)


@dataclass(frozen=True)
class Proof:
    """Hold the largest differences of output and gradients between a tiny copy of a model (*clone*) on two tensor ranks
    and the same clone in one process.
    """

    output: float  # largest difference of the output, relative to the output's largest entry
    gradient: float  # largest difference of a gradient, relative to the gradient's largest entry
    parameter: str  # name of the parameter whose gradient differs most

    @property
    def worst(self) -> float:
        """The larger one of the differences of output and gradient."""
        return max(self.output, self.gradient)


@dataclass(frozen=True)
class Inference:
    """Hold a blueprint that was derived from a model's structure, with the comparison that proves it: two tensor ranks
    against one process.
    """

    blueprint: Blueprint  # the inferred blueprint
    proof: Proof  # the comparison of two ranks with one process, on a tiny clone
    attention: tuple[str, ...]  # paths of the blocks that mix tokens
    whole: tuple[str, ...]  # the reasons why the layers' other modules are not sharded


def as_data(found: Inference) -> dict[str, Any]:
    """Return an inferred blueprint, and the comparison that proves it, as data that can be written as JSON."""
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
    """Return the fields of a block that differ from their defaults, as data for JSON; functions become their names."""
    return {name: _named(value) for name, value in given_fields(block).items()}


def from_data(data: dict[str, Any]) -> Inference:
    """Rebuild an inferred blueprint, and the comparison that proves it, from the data that :func:`as_data` returned."""
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


# ``column`` and ``row`` have no default, so they always count as given.
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
