"""Plan a model with adapters, and raise for unsupported adapters, without starting ranks."""

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..._compat.peft import (
    COPIES,
    DORA_MAGNITUDES,
    IN_FRONT,
    LORA_A,
    OF_WHOLE_PROJECTIONS,
    ROTATIONS,
)
from ...errors import ConfigError
from ...plan import AdapterParameter, ParameterPlan, Plan
from ...plan.feature_plans import FusedAdaptersPlan, recomputed
from ...train.runtime.parameter_names import module_at
from .adapter_structure import adapter_parameters, check_matches, target_names, wrap
from .fused_lora import why_unfused
from .plan import plan_adapters
from .prompts import parameters_in_front
from .several import refuse_beside
from .storage import (
    check_config,
    check_over_quantized,
    refuse_wrong,
)
from .token_rows import refuse_unfit
from .whole_projections import refuse_other_modules


def plan_with_adapters(
    template: nn.Module,
    config: Any,
    plan: Plan,
    new: bool,
    fused: bool,
) -> Plan:
    """Return the plan with the adapters of ``config``, ``new`` or saved, in their final dtypes. PEFT wraps
    ``template``, the full model on the meta device, to find them.
    """
    _, planned = wrap_and_plan(template, config, plan, new, fused)
    kinds = {
        a.name: type_beside(planned.by_name[a.base].dtype, a.kept_in)
        for a in planned.adapters
        if a.kept_in not in IN_FRONT
    }
    own = (replace(p, dtype=kinds.get(p.name, p.dtype)) for p in planned.parameters)
    return replace(planned, parameters=tuple(own))


def is_known(config: Any, plan: Plan) -> bool:
    """Return whether hfscale itself adds a config's adapters; in one process, PEFT's own functions add the others.

    Raises:
        ConfigError: the config is supported in no layout.
    """
    refuse_wrong(config, plan)
    _refuse_quantized_copies(config, plan)
    if config.is_prompt_learning:
        return False
    try:
        _check(config, plan)
    except ConfigError:
        # PEFT does not support modules that hold such weights.
        if plan.quantized is not None and not plan.quantized.by_bitsandbytes:
            raise
        return False
    return True


def wrap_and_plan(
    template: nn.Module,
    config: Any,
    plan: Plan,
    new: bool,
    fused: bool,
    name: str = "default",
    autocast: bool = True,
    beside: bool = False,
) -> tuple[Any, Plan]:
    """Let PEFT wrap ``template``, the full model; return PEFT's model, and the stock ``plan`` with the adapters'
    parameters. PEFT fills in missing fields of ``config``.

    With ``beside``, ``template`` is PEFT's model with other adapters, and the returned plan includes these, too.
    """
    _check(config, plan)
    asked = copy.deepcopy(config)
    try:
        whole = wrap(template, config, name, autocast, beside)
    except ConfigError as error:
        hint = (
            f"; the model has {', '.join(target_names(plan))}"
            if "arget modules" in str(error)
            else ""
        )
        raise ConfigError(f"{error}{hint}") from error
    prompt = config.is_prompt_learning
    adapters = (parameters_in_front if prompt else adapter_parameters)(whole, plan)
    if (
        new and not prompt
    ):  # saved configs may list names that this model lacks; for saved adapters, the tensors are checked instead
        own = [adapter for adapter in adapters if adapter.adapter == name]
        check_matches(asked, config, plan, own)
    planned = plan_with(whole, adapters, plan, fused)
    _check_places(planned)
    refuse_unfit(planned)
    refuse_other_modules(planned)
    refuse_cut_groups(config, planned)
    if beside:
        refuse_beside(whole, planned)
    return whole, planned


def plan_with(whole: Any, adapters: Sequence[AdapterParameter], plan: Plan, fused: bool) -> Plan:
    """Return ``plan``, the plan of a model without adapters, plus the ``adapters`` of PEFT's model ``whole``."""
    planned = plan_adapters(plan, adapters)
    if fused and any(adapter.kept_in == LORA_A for adapter in adapters):
        own = _plan_fused(whole, planned)
        planned = replace(planned, features=(*planned.features, own))
    return planned


def _plan_fused(whole: Any, plan: Plan) -> FusedAdaptersPlan:
    """Return the projections that compute LoRA by one operator, and the reasons why other projections do not."""
    again: set[str] = set()
    if plan.layout.sequence_regather:
        again = {name for block in plan.blocks for name in (*block.column, *block.shared)}
    keeps = bool(recomputed(plan).keep)
    stock = whole.get_base_model()
    others = []
    paths = dict.fromkeys(adapter.module for adapter in plan.adapters if adapter.kept_in == LORA_A)
    for path in paths:
        reason = why_unfused(module_at(stock, path))
        if path == plan.head:
            reason = "the head, which the loss calls by chunks"
        elif path in again:
            reason = "its input is gathered again"
        elif keeps:
            reason = "recompute_keep keeps results that the fused operator would overwrite"
        if reason is not None:
            others.append((path, reason))
    return FusedAdaptersPlan(len(paths) - len(others), tuple(others))


def _check(config: Any, plan: Plan) -> None:
    """Raise :class:`ConfigError`, before PEFT wraps a model, for adapter configs that hfscale cannot shard."""
    refuse_wrong(config, plan)
    check_config(config)
    tied = next((planned for planned in plan.parameters if planned.tied_to is not None), None)
    if tied is not None and getattr(config, "ensure_weight_tying", False):
        _check_tying(config, plan, tied)
    method = getattr(config.peft_type, "value", config.peft_type)
    drawn = ["rank_dropout", "module_dropout", "hira_dropout"]
    if method in OF_WHOLE_PROJECTIONS and plan.layout.tp > 1:
        drawn.append(f"{method.lower()}_dropout")
    for field in drawn:
        if getattr(config, field, 0.0) and plan.layout.total_size > 1:
            raise ConfigError(
                f"{type(config).__name__}({field}=...) draws random numbers by the size of each rank's shard, so they "
                "would differ from the numbers that one process draws: leave this option out, or use one process"
            )
    if getattr(config, "generator_seed", None) is not None and plan.layout.total_size > 1:
        raise ConfigError(
            f"{type(config).__name__}(generator_seed=...) draws from separate random generators, which are equal on "
            "ranks with different batches and which no saved state contains: leave generator_seed out, or use one "
            "process"
        )
    trains_biases = getattr(config, "bias", "none") != "none"
    if method in OF_WHOLE_PROJECTIONS and trains_biases and plan.layout.tp > 1:
        raise ConfigError(
            f"{type(config).__name__}(bias={config.bias!r}) trains biases, but tp_size > 1 shards them and this PEFT "
            "method computes with full biases: leave bias out, or use tp_size=1"
        )
    if plan.quantized is not None:
        check_over_quantized(config, plan.quantized, plan.layout.data_world)
    _check_copies(config, plan)


def _check_tying(config: Any, plan: Plan, tied: ParameterPlan) -> None:
    """Raise for low-rank factors on tied weights, and for copies of a head with a bias, which PEFT's tied copy
    omits.
    """
    wanted = getattr(config, "target_modules", None) or ()
    ends = {name.rpartition(".")[0] for name in (tied.name, str(tied.tied_to))}
    listed = () if isinstance(wanted, str) else wanted
    adapted = [end for end in ends for name in listed if f".{end}".endswith(f".{name}")]
    if isinstance(wanted, str):
        adapted = [end for end in ends if re.fullmatch(wanted, end)]
    if adapted:
        # PEFT ties factors as views of one storage, but each view is a parameter with its own gradient.
        raise ConfigError(
            f"ensure_weight_tying=True cannot be used with target_modules on tied weights ({tied.name} is tied to "
            f"{tied.tied_to}), got {adapted[0]}: train the tied weight with modules_to_save or "
            "trainable_token_indices, or leave ensure_weight_tying out"
        )
    copies = getattr(config, "modules_to_save", None)
    bias = f"{tied.name.rpartition('.')[0]}.bias"
    if copies and bias in plan.by_name:
        raise ConfigError(
            f"ensure_weight_tying=True with modules_to_save needs a head without a bias, got {bias}, which the tied "
            "copy that PEFT makes would not have: use trainable_token_indices"
        )


def _check_copies(config: Any, plan: Plan) -> None:
    """Raise for trained copies of modules that are sharded, or that contain sharded or quantized modules."""
    # Copies of experts with their router cannot be expert-parallel.
    mixtures = (
        [mixture.name.rpartition(".")[0] for mixture in plan.mixtures] if plan.layout.ep > 1 else []
    )
    cut = (*plan.layers, *(block.name for block in plan.blocks), *mixtures)
    for wanted in getattr(config, "modules_to_save", None) or ():
        inside = [name for name in cut if f".{wanted}." in f".{name}."]
        if inside:
            raise ConfigError(
                f"modules_to_save={wanted!r} is or contains {inside[0]}, but modules_to_save can copy only modules "
                "outside of the layers, and single projections: name such modules, or train the whole model without "
                "adapters"
            )
    _refuse_quantized_copies(config, plan)


def _refuse_quantized_copies(config: Any, plan: Plan) -> None:
    """Raise for trained copies of modules with quantized weights, which have no gradients (in stock code, too)."""
    quantized = plan.quantized
    head = plan.head
    for wanted in getattr(config, "modules_to_save", None) or ():
        inside = [name for name in plan.quantized_weights if f".{wanted}." in f".{name}."]
        if inside and quantized is not None:
            # transformers matches prefixes of names, and a user's list replaces transformers' own list, which contains
            # the head.
            paths = [name[: f".{name}.".index(f".{wanted}.") + len(wanted)] for name in inside]
            skipped = list(dict.fromkeys(paths if head is None else [*paths, head]))
            instead = (
                f"leave it out of quantization, BitsAndBytesConfig(llm_int8_skip_modules={skipped})"
            )
            if not quantized.by_bitsandbytes:
                instead = "adapt it instead, by target_modules"
            raise ConfigError(
                f"modules_to_save={wanted!r} trains all weights of a module, but {inside[0]} is {quantized.described} "
                f"and gets no gradients: {instead}"
            )


def _check_places(plan: Plan) -> None:
    """Raise for DoRA on a sharded embedding, and for adapters on modules that several stages have, because only
    gradients of the model's own parameters are summed over stages.
    """
    for adapter in plan.adapters:
        embeds = (
            adapter.base == f"{plan.embedding}.weight"
            and plan.by_name[adapter.base].cut_over("tp") is not None
        )
        if embeds and adapter.kept_in == DORA_MAGNITUDES:
            raise ConfigError(
                f"{plan.embedding}: hfscale does not support DoRA on an embedding that is sharded along the "
                "vocabulary: leave the embedding out of target_modules, or use tp_size=1"
            )
        if adapter.kept_in in IN_FRONT:
            continue
        if sum(plan.is_local(rank, adapter.name) for rank in range(plan.layout.pp)) > 1:
            path = adapter.module
            raise ConfigError(
                f"{path} runs on several pipeline stages, where the copies of its adapter would diverge: leave this "
                f"module out (exclude_modules=[{path.rpartition('.')[2]!r}]), or use pp_size=1"
            )


def refuse_cut_groups(config: Any, plan: Plan) -> None:
    """Raise :class:`ConfigError` if one of RoAd's groups of outputs, which are rotated together, spans tensor ranks."""
    size = int(getattr(config, "group_size", 1) or 1)
    for adapter in plan.adapters:
        base = plan.by_name[adapter.base]
        cut = base.cut_over("tp")
        rotated = adapter.kept_in in ROTATIONS and cut is not None and cut.dim == 0
        if not rotated or cut is None:
            continue
        spans = [span for rank in range(cut.size) for span in cut.spans(base.shape[0], rank)]
        if any(edge % size for span in spans for edge in span):
            raise ConfigError(
                f"RoadConfig(group_size={size}) must divide the outputs of {adapter.base} on each tensor rank into "
                f"full groups, got ranks with the outputs {spans}: use a smaller group_size, or another tp_size"
            )


def type_beside(base: torch.dtype, kept_in: str, autocast: bool = True) -> torch.dtype:
    """Return the dtype of an adapter's parameter on a weight of dtype ``base``, by PEFT's rules. Factors of quantized
    weights, and with ``autocast`` of 16-bit weights, are in 32 bits; all other factors, and trained copies, have the
    weight's dtype.
    """
    wide = base.is_floating_point and (base.itemsize > 2 or not autocast)
    return base if wide or kept_in in COPIES else torch.float32
