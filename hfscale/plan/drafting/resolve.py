"""Find a model's blueprint: in hfscale's table, from transformers' TP plan, or by inference, in that order."""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from ...config.parallel import AXES, ParallelConfig
from ...errors import PlanError
from ...models import FAMILIES
from ...models.blueprint import Block, Blueprint, Inference, block_as_data, from_data
from ...models.facts import ask
from ...models.translate import translate_host_plan
from ..parameter import join_path
from .blocks import plan_blocks
from .draft import Draft
from .layers import find_layers
from .text_model import blueprint_of_text, find_text_model


def find_blueprint(model: Any, may_infer: bool = True) -> Blueprint:
    """Find the blueprint of a model on any device (meta too); if none is written, infer one, in a second or two."""
    config = model.config
    if config.model_type in FAMILIES:
        return FAMILIES[config.model_type]
    text = find_text_model(model)
    if text is not None:
        return blueprint_of_text(model, text, find_blueprint, may_infer)
    host_plan = getattr(config, "base_model_tp_plan", None) or getattr(
        getattr(model, "base_model", model).config, "base_model_tp_plan", None
    )
    if host_plan:
        try:
            translated = translate_host_plan(host_plan, config.model_type)
        except PlanError as error:
            missing = str(error)
        else:
            return translated if not may_infer else _completed(model, translated)
    else:
        missing = (
            f"tp_size > 1 needs a blueprint of {config.model_type!r}, and neither hfscale's table nor the model "
            f"({type(model).__name__} has no base_model_tp_plan) gives one: use tp_size=1, or add an entry to "
            "hfscale.models.FAMILIES naming the layer list and each block's column and row projections"
        )
    if not may_infer:
        raise PlanError(missing)
    try:
        return infer(model).blueprint
    except PlanError as error:
        raise PlanError(f"{missing}. Also, {error}") from error


def infer(model: Any) -> Inference:
    """Infer the blueprint of a model without one, with its proof; raise :class:`PlanError` where none holds."""
    found = ask("blueprint", model)
    if "refused" in found:
        raise PlanError(found["refused"])
    return from_data(found)


def _completed(model: Any, translated: Blueprint) -> Blueprint:
    """Complete transformers' TP plan with omitted modules (query and key norms), if a clone proves it; or infer one."""
    sizes: dict[str, Any] = {f"{axis}_size": 1 for axis in AXES}
    draft = Draft(model, ParallelConfig(**{**sizes, "tp_size": 2}, sequence_parallel=False))
    layers = find_layers(draft, translated)
    plan_blocks(draft, translated, layers)
    if not draft.roleless:
        return translated
    blocks = dict(translated.blocks)
    for path, layer in product(blocks, layers):
        blocks[path] = _with_roles(draft, join_path(layer, path), blocks[path])
    completed = replace(translated, blocks=blocks)
    about = json.dumps({path: block_as_data(block) for path, block in blocks.items()}, sort_keys=True)
    if ask("completed", model, about, blueprint=completed, forgotten=draft.roleless):
        return completed
    with suppress(PlanError):
        return infer(model).blueprint
    return translated


def _with_roles(draft: Draft, block: str, role: Block) -> Block:
    """Add a block's roleless modules: norms as wide as a cut projection are computed across, all else is used whole."""
    inside = (name.removeprefix(f"{block}.") for name in draft.roleless if name.startswith(f"{block}."))
    modules = draft.modules
    widths = {getattr(modules.get(f"{block}.{column}"), "out_features", None) for column in role.column}
    shared, across, keys = list(role.shared), list(role.across), dict(role.key_value)
    for child in dict.fromkeys(name.rpartition(".")[0] for name in inside):
        weight = getattr(modules.get(f"{block}.{child}"), "weight", None)
        wide = weight is not None and weight.ndim == 1 and len(weight) in widths
        chosen = across if wide else shared
        chosen += [child] if child not in chosen else []
        if wide and child.startswith("k"):
            keys[child] = ()
    return replace(role, shared=tuple(shared), across=tuple(across), key_value=keys)
