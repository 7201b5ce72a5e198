"""Find a model's blueprint, which says how tensor parallelism shards its modules. The first of these is taken: an entry
of hfscale's table, transformers' TP plan, a blueprint derived from the model itself.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from ..config.parallel import AXES, ParallelConfig
from ..errors import PlanError
from ..models import FAMILIES
from ..models.blueprint import TRANSLATED, Block, Blueprint, Inference, block_as_data, from_data
from ..models.class_source import is_proved_source
from ..models.facts import ask
from ..parallel.tensor.blocks import plan_blocks
from ..plan.drafting.draft import Draft
from ..plan.drafting.layers import find_layers
from ..plan.drafting.text_model import blueprint_of_text, find_text_model
from ..plan.parameter import join_path

_log = logging.getLogger(__name__)
_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "shared",
    "mla_kv_a_proj": "shared",
}
# For a parameter [experts, out, in]: the dim that is sharded, and how many matrices are concatenated along it.
_EXPERT_STYLES = {
    "colwise": (1, 1),
    "packed_colwise": (1, 2),
    "rowwise": (2, 1),
    "packed_rowwise": (2, 2),
}
_GATHERED = ("colwise_gather_output", "rowwise_split_input")
# One rule of transformers' TP plan: the module's layer list, its path inside a layer, and its style.
_Rule = tuple[str, str, str]
# One block: field of :class:`Block` -> module, and the way the module is sharded, if the rule gives one.
_Roles = dict[str, dict[str, Any]]


def find_blueprint(model: Any, may_infer: bool = True) -> Blueprint:
    """Find the blueprint of a model, which says how tensor parallelism shards its modules. The model may be on any
    device, even meta. If neither hfscale's table nor transformers has a plan for the model, derive one in a second or
    two.
    """
    config = model.config
    if config.model_type in FAMILIES:
        written = FAMILIES[config.model_type]
        return _that_holds(model, written) if may_infer else written
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
            f"tp_size > 1 needs a blueprint of {config.model_type!r}, but neither hfscale's table nor the model "
            f"({type(model).__name__} has no base_model_tp_plan) has one: use tp_size=1, or add an entry to "
            "hfscale.models.FAMILIES naming the layer list and each block's column and row projections"
        )
    if not may_infer:
        raise PlanError(missing)
    try:
        return infer(model).blueprint
    except PlanError as error:
        raise PlanError(f"{missing}. Also, {error}") from error


def _that_holds(model: Any, written: Blueprint) -> Blueprint:
    """Return the blueprint ``written`` of hfscale's table (how tensor parallelism shards the model's modules) if it
    still fits. If the stock code has changed since the blueprint was proved, compare two tensor ranks of a tiny copy of
    the model with one process. If their results differ, infer a new blueprint.
    """
    family = model.config.model_type
    if is_proved_source(family, type(model)):
        return written
    objection = ask("holds", model, blueprint=written)
    if objection is None:
        message = "%s has changed since hfscale's entry of %r was proved, and no clone can test whether it holds"
        _log.warning(message, type(model).__name__, family)
    if not objection:
        return written
    try:
        return infer(model).blueprint
    except PlanError as error:
        raise PlanError(
            f"tp_size > 1 cannot shard {type(model).__name__}, because the installed code differs from the sharding "
            f"rules that hfscale has for {family!r} ({objection}): use tp_size=1, or a release of transformers that "
            f"hfscale was tested with. Also, {error}"
        ) from error


def infer(model: Any) -> Inference:
    """Derive from the model how tensor parallelism shards its modules (a blueprint), and prove it: two tensor ranks of
    a tiny copy of the model must compute the same as one process. Raise :class:`PlanError` if no blueprint passes.
    """
    facts = ask("blueprint", model)
    if "refused" in facts:
        raise PlanError(facts["refused"])
    return from_data(facts)


def _completed(model: Any, translated: Blueprint) -> Blueprint:
    """Complete a blueprint (how tensor parallelism shards a model's modules) that was ``translated`` from transformers'
    TP plan, which omits some modules (query and key norms). Return the result if two tensor ranks of a tiny copy of the
    model compute the same as one process. Otherwise return an inferred blueprint, or ``translated`` if none can be
    inferred.
    """
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
    about = json.dumps(
        {path: block_as_data(block) for path, block in blocks.items()}, sort_keys=True
    )
    if ask("completed", model, about, blueprint=completed, forgotten=draft.roleless):
        return completed
    with suppress(PlanError):
        return infer(model).blueprint
    return translated


def _with_roles(draft: Draft, block: str, role: Block) -> Block:
    """Return the sharding rules ``role`` of an attention or MLP block, completed for modules of the block without a
    rule: norms as wide as a sharded projection are computed across ranks, and all other modules are replicated.
    """
    inside = (
        name.removeprefix(f"{block}.") for name in draft.roleless if name.startswith(f"{block}.")
    )
    modules = draft.modules
    widths = {
        getattr(modules.get(f"{block}.{column}"), "out_features", None) for column in role.column
    }
    shared = list(role.shared)
    across = list(role.across)
    keys = dict(role.key_value)
    for child in dict.fromkeys(name.rpartition(".")[0] for name in inside):
        weight = getattr(modules.get(f"{block}.{child}"), "weight", None)
        wide = weight is not None and weight.ndim == 1 and len(weight) in widths
        chosen = across if wide else shared
        chosen += [child] if child not in chosen else []
        if wide and child.startswith("k"):
            keys[child] = ()
    return replace(role, shared=tuple(shared), across=tuple(across), key_value=keys)


def translate_host_plan(host_plan: dict[str, str], family: str) -> Blueprint:
    """Translate transformers' TP plan, ``{"layers.*.self_attn.q_proj": "colwise", ...}``, to a blueprint (how hfscale
    shards the modules). Raise :class:`PlanError` if a rule is outside the layer list, or has a style that hfscale does
    not translate.

    transformers names a DTensor style for each module. hfscale instead needs blocks (attention, MLP), with collectives
    at their inputs and outputs. So the rules of one parent module make one block. A mixture-of-experts module is one
    block together with its experts, shared experts and router, because their outputs are summed before they leave the
    module. If transformers gathers values in the middle of a block (for a norm over the full width of a sharded
    projection), the block is replicated: each rank computes the right result, but the work is not divided.
    """
    rules, unknown = _rules_of_layers(host_plan)
    experts = tuple(path for _, path, style in rules if style == "moe_tp_experts")
    own_heads = tuple(path for _, path, style in rules if style == "local_params")
    roles, mixtures, foreign = _roles(rules, experts)
    unknown += [f"{layers}.*.{path}: {style}" for layers, path, style in foreign]
    lists = {layers for layers, _, _ in rules}
    if unknown or len(lists) != 1:
        raise PlanError(
            f"tp_size > 1 cannot use the tensor-parallel plan of {family!r}: hfscale does not translate "
            f"{'; '.join(unknown) or 'rules for more than one layer list: ' + ', '.join(sorted(lists))}. "
            "Use tp_size=1, or add the family to hfscale.models.FAMILIES"
        )
    incomplete = [
        block
        for block, role in roles.items()
        if not (role["column"] and role["row"]) and not role["cut"]
    ]
    if incomplete:
        raise PlanError(
            f"tp_size > 1 cannot use the tensor-parallel plan of {family!r}: its blocks {', '.join(incomplete)} lack a "
            "projection that is sharded by columns, or one that is sharded by rows. Use tp_size=1, or add the family "
            "to hfscale.models.FAMILIES"
        )
    return Blueprint(
        layers=lists.pop(),
        blocks={
            block: _block(
                role,
                own_heads=block in own_heads,
                mixture=block in mixtures,
                optional=bool(experts),
            )
            for block, role in roles.items()
        },
        source=TRANSLATED,
    )


def _rules_of_layers(host_plan: dict[str, str]) -> tuple[list[_Rule], list[str]]:
    """Split transformers' TP plan: return its rules for modules in layers, and descriptions of its other rules. A rule
    for the embedding is ignored.
    """
    rules = []
    unknown = []
    for pattern, style in host_plan.items():
        prefix, star, rest = pattern.partition(".*.")
        if style == "embedding_rowwise":
            continue  # the vocabulary is always sharded, whatever transformers' plan contains
        if not star or "*" in rest or ("." not in rest and style != "local_params"):
            unknown.append(f"{pattern}: {style}")
            continue
        rules.append((prefix, rest, style))
    return rules, unknown


def _roles(
    rules: Sequence[_Rule], experts: tuple[str, ...]
) -> tuple[dict[str, _Roles], tuple[str, ...], list[_Rule]]:
    """Sort the rules of a TP plan by block (attention, MLP). Return how each block's modules are sharded, the blocks
    whose remaining modules are replicated, and the rules whose styles are unknown.
    """
    mixtures = tuple(path.rpartition(".")[0] for path in experts)
    inside_experts = tuple(f"{path}." for path in experts)
    roles: dict[str, _Roles] = defaultdict(lambda: defaultdict(dict))
    whole = set()
    unknown = []
    for rule in rules:
        _, path, style = rule
        block = next(
            (mixture for mixture in mixtures if path.startswith(f"{mixture}.")),
            path.rpartition(".")[0],
        )
        name = path.removeprefix(f"{block}.")
        if style in ("moe_tp_experts", "local_params"):
            continue
        if style in _GATHERED:
            whole.add(block)
        elif path.startswith(inside_experts) and style in _EXPERT_STYLES:
            roles[block]["cut"][name] = _EXPERT_STYLES[style]
        elif style in _STYLES:
            roles[block][_STYLES[style]][name] = None
            # Low-rank attention computes its full latents on each rank, between the block's collectives.
            if style == "mla_kv_a_proj":
                mixtures += (block,)
        else:
            unknown.append(rule)
    return {block: role for block, role in roles.items() if block not in whole}, mixtures, unknown


def _block(role: _Roles, own_heads: bool, mixture: bool, optional: bool) -> Block:
    """Return a blueprint's :class:`Block` from the modules in ``role``, sorted by how they are sharded (column, row,
    ...). ``optional``: some layers lack some of the modules, because dense and mixture-of-experts layers share this
    block.
    """
    column = list(role["column"])
    row = list(role["row"])
    for name in ("shared_expert", "shared_experts", "shared_mlp") if role["cut"] else ():
        # TP plans that cover only experts omit the shared expert
        column += [f"{name}.{part}" for part in ("gate_proj", "up_proj", "gate_up_proj")]
        row.append(f"{name}.down_proj")
    return Block(
        column=tuple(dict.fromkeys(column)),
        row=tuple(dict.fromkeys(row)),
        shared=tuple(role["shared"]),
        cut=role["cut"],
        parts={name: 2 for name in column if name.endswith(".gate_up_proj")},
        own_heads=own_heads,
        rest_shared=mixture,
        optional=optional,
        dropout=() if role["cut"] else ("attention_dropout",),
    )
