"""Find the text model inside a multimodal model, and translate its blueprint to the multimodal model's names.

A vision-language model (LLaVA, Liu et al. 2023) is a tower, a projector, and an ordinary decoder with a config of its
own. The decoder has the blueprint that it has alone; towers and projectors are not cut over tensor ranks. There each
rank computes the same as one process, and so do their gradients, since blocks return full gradients to their inputs.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ..._compat.transformers.caches import CACHES
from ...errors import PlanError
from ...models.blueprint import Block, Blueprint
from ...models.fields import text_config
from ..parameter import join_path
from .layers import find_layer_list, find_lists

_PLAIN = {
    "args",
    "kwargs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "cache_position",
    "head_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "labels",
    "logits_to_keep",
    "use_cache",
    *CACHES,
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}
"""Inputs of models of text, none of which is made of pictures but the embeddings."""

_CROSS = ("encoder_hidden_states", "cross_attention_states", "key_value_states")
"""Inputs of the host's attention, besides the stream, that keys and values are made of."""

Find = Callable[[Any, bool], Blueprint]


def find_text_model(model: Any) -> str | None:
    """Return the name of the module with ``model``'s text config; ``None`` if that is itself, or an encoder-decoder."""
    config = text_config(model.config)
    if config is model.config or any(
        getattr(c, "is_encoder_decoder", False) for c in (model.config, config)
    ):
        return None
    inner = (
        (name, module)
        for name, module in model.named_modules()
        if name and isinstance(module, PreTrainedModel)
    )
    return next((name for name, module in inner if module.config is config), None)


def blueprint_of_text(model: Any, name: str, find: Find, may_infer: bool) -> Blueprint:
    """Return ``find``'s blueprint of the text model ``name`` in ``model``'s names, or of layers alone."""
    inner = model.get_submodule(name)
    try:
        blueprint = find(inner, may_infer)
        lists = find_lists(inner, blueprint)
    except PlanError:
        if may_infer:
            raise
        blueprint = Blueprint("", {})
        lists = [find_layer_list(inner)]
    blocks = {
        child: _with_cross_inputs(inner, lists, child, block)
        for child, block in blueprint.blocks.items()
    }
    return replace(
        blueprint,
        layers=tuple(f"{name}.{path}" for path in lists),
        blocks=blocks,
        config_of=text_config,
    )


def _with_cross_inputs(inner: Any, lists: list[str], child: str, block: Block) -> Block:
    """Add cross-attention inputs (made by a tower) to a block's entries; proofs, which run text alone, miss them."""
    if block.enter != ("",):
        return block
    modules = dict(inner.named_modules())
    layers = (f"{path}.{name}" for path in lists for name, _ in modules[path].named_children())
    blocks = (modules.get(join_path(layer, child)) for layer in layers)
    inputs = {
        name
        for module in blocks
        if module is not None
        for name in inspect.signature(module.forward).parameters
    }
    missing = tuple(name for name in _CROSS if name in inputs and name not in block.enter_inputs)
    return replace(block, enter_inputs=(*block.enter_inputs, *missing)) if missing else block


def other_inputs(text: Any) -> tuple[str, ...]:
    """Return the inputs of a text model that models of text alone do not have."""
    return tuple(name for name in inspect.signature(text.forward).parameters if name not in _PLAIN)
