"""Plan activation recomputation, offloading to the CPU, and compression of activations."""

import sys
from importlib.util import find_spec

from ..._compat.torch import operators_named
from ..._compat.transformers.implementations import implementation_of
from ...errors import did_you_mean
from ...models.fields import HEAD_FIELDS, counts, text_config
from ...models.names import wild_name
from ...plan.drafting.draft import Draft, Planned
from ...plan.feature_plans import (
    CompressPlan,
    OffloadPlan,
    RecomputePlan,
    ScoresPlan,
    compressed,
    offloaded,
)

_ATTENTION = "ALL_ATTENTION_FUNCTIONS"  # transformers' table in which modeling files look up attention functions


def plan_memory(draft: Draft) -> None:
    """Add the plans of recomputation, offloading and compression to ``draft``, the plan under construction. They are
    the same on every rank.
    """
    asked = draft.options.memory_levers
    _plan_offload(draft)
    _plan_compression(draft)
    config = text_config(draft.config)
    heads = counts(config, ("decoder_attention_heads",)) or counts(config, HEAD_FIELDS)
    # eager attention, because it is requested or the family has no other implementation
    if heads and implementation_of(config) == "eager":
        draft.features.append(ScoresPlan(max(heads)))
    given = asked.recompute
    if given == "none":
        return
    if not draft.layers:
        draft.problem(
            f"recompute={given!r} recomputes activations of layers, but no list of layers was found in this model: "
            "use recompute='none'"
        )
        return
    _refuse_unknown_operators(draft)
    if given == "selective":
        _refuse_other_attention(draft)
        draft.features.append(RecomputePlan(attention=True))
    elif asked.tile_tokens is not None:
        layers = tuple(draft.layers) if given == "full" else ()
        tiled = _tiled(draft, asked.tile_tokens)
        keep = tuple(asked.recompute_keep)
        draft.features.append(
            RecomputePlan(layers, tiled, elementwise=True, tile=asked.tile_tokens, keep=keep)
        )
    elif given == "elementwise":
        draft.features.append(RecomputePlan(elementwise=True))
    elif isinstance(given, tuple):
        draft.features.append(RecomputePlan(modules=_modules(draft, given)))
    else:
        every = given if isinstance(given, int) else 1
        if every > len(draft.layers):
            draft.problem(
                f"recompute={every} means every {every}th layer, but the model has {len(draft.layers)} layers: use a "
                f"number of at most {len(draft.layers)}, 'full' (every layer) or 'none'"
            )
        layers = tuple(draft.layers[::every])
        keep = tuple(asked.recompute_keep)
        budget = asked.budget
        draft.features.append(RecomputePlan(layers, keep=keep, budget=budget, tokens=asked.tokens))


def _plan_offload(draft: Draft) -> None:
    asked = draft.options.memory_levers
    if asked.offload_parameters and draft.layout.data_world == 1:
        draft.problem(
            "offload_parameters=True moves FSDP2's shards of the parameters to the host, but with one data rank "
            "FSDP2 does not shard them: use dp_shard_size=2 or more, or offload_optimizer=True"
        )
    if asked.least_offloaded is not None and not draft.layers:
        draft.problem(
            "offload_activations= moves activations of layers to the host, but no list of layers was found in this "
            "model: leave offload_activations out"
        )
    if asked.offload_optimizer or asked.offload_parameters or asked.least_offloaded is not None:
        draft.features.append(
            OffloadPlan(asked.offload_optimizer, asked.offload_parameters, asked.least_offloaded)
        )


def _plan_compression(draft: Draft) -> None:
    least = draft.options.memory_levers.least_compressed
    if least is None:
        return
    if not draft.layers:
        draft.problem(
            "compress_activations= keeps activations of layers in 8 bits, but no list of layers was found in this "
            "model: leave compress_activations out"
        )
    elif find_spec("bitsandbytes") is None:
        draft.problem(
            "compress_activations= needs bitsandbytes' kernels, and bitsandbytes is not installed: pip install "
            "bitsandbytes, or leave compress_activations out"
        )
    again = draft.options.memory_levers.recompute
    if draft.mixtures and again not in ("none", "selective", "elementwise"):
        draft.problem(
            f"compress_activations= cannot be used with recompute={again!r}: if a layer is recomputed from its "
            f"compressed input, the router of {wild_name(draft.mixtures[0].name)} may send tokens to other experts "
            "than in the forward pass: use recompute='none', 'selective' or 'elementwise', or "
            "offload_activations=True instead of compress_activations"
        )
    draft.features.append(CompressPlan(least))


def _tiled(draft: Draft, tile: int) -> tuple[str, ...]:
    """Return the modules that can be recomputed in tiles, because they compute each token by itself: MLPs and norms of
    the layers, and norms after the layers. If the model has no such modules, report a problem in ``draft`` (the plan
    under construction), which is raised later.
    """
    said = f"tile_tokens={tile}"
    if draft.mixtures:
        draft.problem(
            f"{said} recomputes modules on tiles of a microbatch's tokens, but {wild_name(draft.mixtures[0].name)} "
            "distributes all tokens of a microbatch to experts at once: use recompute='full' without tile_tokens, "
            "and more context ranks to save memory"
        )
    if draft.options.mixed_precision == "fp8":
        draft.problem(
            f"{said} cannot be used with mixed_precision='fp8', which needs one scale for a whole tensor, but tiles "
            "are computed one after another: use mixed_precision='bf16', or leave tile_tokens out"
        )
    above = draft.layers[0].rpartition(".")[0].rpartition(".")[0]
    tiled = dict[str, bool]()
    for name, module in draft.modules.items():
        kind = type(module).__name__
        parent = name.rpartition(".")[0]
        is_mlp = parent in draft.layers and kind.endswith(("MLP", "FeedForward"))
        if is_mlp or (parent in (above, *draft.layers) and "Norm" in kind):
            tiled[name] = is_mlp
    if not any(tiled.values()):
        draft.problem(
            f"{said} finds no MLP in the layers of {draft.config.model_type!r}: leave tile_tokens out"
        )
    inside = [
        name.removeprefix(f"{draft.layers[0]}.")
        for name in tiled
        if name.startswith(f"{draft.layers[0]}.")
    ]
    _modules(draft, tuple(inside))
    return tuple(tiled)


def _modules(draft: Draft, given: tuple[str, ...]) -> tuple[str, ...]:
    kept = [name for name, module in draft.modules.items() if module is not None]
    inside = {
        name: layer for layer in draft.layers for name in kept if name.startswith(f"{layer}.")
    }
    modules = dict[str, None]()
    for end in given:
        named = [
            name
            for name, layer in inside.items()
            if f".{name.removeprefix(layer + '.')}".endswith(f".{end}")
        ]
        if not named:
            known = sorted(
                {wild_name(name.removeprefix(f"{layer}.")) for name, layer in inside.items()}
            )
            hint = f"{did_you_mean(end, known)}use one of {', '.join(known)}"
            draft.problem(f"recompute names the module {end!r}, which no layer has: {hint}")
        modules |= dict.fromkeys(named)
    for block in draft.blocks:
        if block.name in modules and block.dropout > 0:
            draft.problem(
                f"recompute={list(given)}: {wild_name(block.name)} applies dropout to activations sharded over "
                f"tp_size={draft.tp} ranks, and recomputing only this module would draw another dropout mask than the "
                "forward pass did: use recompute='full', or set the module's dropout to 0"
            )
        alone = [
            name
            for name in block.column
            if any(f"{name}.".startswith(f"{module}.") for module in modules)
        ]
        if alone and draft.layout.sequence_regather:
            draft.problem(
                f"recompute={list(given)}: recomputing {wild_name(alone[0])} needs its input gathered from all tensor "
                "ranks, which sequence_regather=True does not keep: use recompute='full', or sequence_regather=False"
            )
    return tuple(modules)


def _refuse_other_attention(draft: Draft) -> None:
    """Report a problem (raised when the plan ``draft`` is complete) if selective recomputation, which replaces
    attention in transformers' ``ALL_ATTENTION_FUNCTIONS``, cannot work: because context parallelism shards sequences,
    or because the model does not look up its attention in this table.
    """
    if draft.layout.cuts_sequences:
        draft.problem(
            f"recompute='selective' cannot be used with {draft.layout.describe()}: it recomputes attention scores, "
            "but attention over sharded sequences keeps no scores: use recompute='none', 'full', or names of modules "
            "such as ['mlp']"
        )
    inside = tuple(f"{layer}." for layer in draft.layers)
    kinds = {type(module) for name, module in draft.modules.items() if name.startswith(inside)}
    families = [
        kind.__mro__ for kind in kinds if any("Attention" in each.__name__ for each in kind.__mro__)
    ]
    if not any(
        hasattr(sys.modules.get(each.__module__), _ATTENTION)
        for family in families
        for each in family
    ):
        draft.problem(
            f"recompute='selective' recomputes attention, but {draft.config.model_type!r} does not take its attention "
            f"function from transformers' {_ATTENTION}, where hfscale replaces it: use recompute='full', or names of "
            "modules, as recompute=['self_attn']"
        )


def _refuse_unknown_operators(draft: Draft) -> None:
    for name in draft.options.memory_levers.recompute_keep:
        operators = operators_named(name)
        if operators is None:
            draft.problem(
                f"recompute_keep: torch has no operator {name!r}: use a name like 'aten.mm' or 'aten.mm.default'"
            )
        elif not operators:
            draft.problem(
                f"recompute_keep: {name} works in place and returns no new tensor to keep: leave {name} out"
            )


def recomputes(model: Planned) -> bool:
    """Return whether modules are recomputed in the backward pass."""
    return model.plan.feature(RecomputePlan) is not None


def moves_activations(model: Planned) -> bool:
    """Return whether activations are kept on the host, or in 8 bits."""
    return offloaded(model.plan).activations is not None or compressed(model.plan) is not None
