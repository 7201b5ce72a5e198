"""Find the text model inside a multimodal model, and translate its blueprint to the multimodal model's names.

A blueprint says which modules of a model are layers, blocks and projections. A vision-language model (LLaVA, Liu et al.
2023) consists of a tower, a projector, and an ordinary decoder with its own config. The decoder has the same blueprint
as a separate text model. Towers and projectors are replicated over tensor ranks: every tensor rank computes the same
outputs and gradients as one process, since tensor-parallel blocks return full gradients to their inputs.
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
"""Inputs of text models. Of these, only the embeddings are computed from images."""

_CROSS = ("encoder_hidden_states", "cross_attention_states", "key_value_states")
"""Inputs of transformers' cross-attention modules from which keys and values are computed."""

Find = Callable[[Any, bool], Blueprint]


def find_text_model(model: Any) -> str | None:
    """Return the name of the text model inside ``model``: the module whose config is the text config. Return ``None``
    if this is ``model`` itself, or for an encoder-decoder.
    """
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
    """Return the blueprint (the names of layers, blocks and projections) of the text model ``name``, with module names
    as in the multimodal ``model``.

    Args:
        model: the multimodal model.
        name: name of the text model in ``model``.
        find: returns the blueprint of a model, or raises :class:`PlanError`; the second argument is ``may_infer``.
        may_infer: whether the blueprint may be derived by a run of the model. If not, and if ``find`` fails, the result
            has only the layer list.
    """
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
    """Add to the inputs of ``block`` the inputs that cross-attention reads, for example ``encoder_hidden_states`` from
    a tower.

    Blocks that were found by a run of the model on text alone lack these inputs.
    """
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
    """Return the inputs of a multimodal model's text model that text models outside of multimodal
    models do not have.
    """
    return tuple(name for name in inspect.signature(text.forward).parameters if name not in _PLAIN)
