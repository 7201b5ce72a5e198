"""Define blocks (attention and MLP modules) that the blueprints of several families share."""

from typing import Any

from .blueprint import Block


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
