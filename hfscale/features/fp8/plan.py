"""Plan which linear projections compute in fp8.

The choice depends only on the full model, so that it is the same in every layout. If a layout would round a chosen
projection differently from one process, the plan gets a problem, which is raised when the plan is complete.
"""

from typing import Any

from ...errors import did_you_mean
from ...models.family_limits import READ_BY_MIXERS
from ...models.module_kinds import PROJECTIONS, weight_dims
from ...models.names import wild_name
from ...plan.drafting.draft import Draft, Planned
from ...plan.feature_plans import ProductsPlan, gathered_in_8_bits

_MULTIPLE = 16  # tensor cores need both sizes of a weight to be multiples of this


def plan_float8(draft: Draft) -> None:
    """Choose the linear projections of the layers that compute in fp8: those whose sizes are multiples of 16, except
    experts, routers, projections that are not called, and those in ``leave_out``.
    """
    asked = draft.options.products
    if asked is None:
        return
    layers = tuple(f"{layer}." for layer in draft.layers)
    modules = {
        name: module for name, module in draft.modules.items() if layers and name.startswith(layers)
    }
    # Subclasses may compute something else.
    inside = {name: module for name, module in modules.items() if type(module) in PROJECTIONS}
    for end in asked.leave_out:
        if not any(_ends(name, end) for name in inside):
            known = sorted({name.rpartition(".")[2] for name in inside})
            hint = did_you_mean(end, known)
            draft.problem(
                f"Float8Config(leave_out=...): no projection of the layers is called {end!r}: {hint}use one of "
                f"{', '.join(known)}"
            )
    reasons = {
        name: _reason(draft, name, module, asked.leave_out) for name, module in inside.items()
    }
    chosen = tuple(name for name, why in reasons.items() if not why)
    if not chosen:
        draft.problem(
            "mixed_precision='fp8' needs linear projections in the layers whose sizes are multiples of "
            f"{_MULTIPLE}, but the model has none: use mixed_precision='bf16'"
        )
    _refuse_parts(draft, chosen)
    left_out = tuple((name, why) for name, why in reasons.items() if why)
    draft.features.append(ProductsPlan(chosen, asked.recipe == "rowwise", left_out, asked.gathers))


def _ends(name: str, end: str) -> bool:
    """Return whether ``end`` is one or more whole components of the dotted ``name``, like ``"mlp"`` of ``"mlp.up"``."""
    return f".{end}." in f".{name}."


def _reason(draft: Draft, name: str, module: Any, leave_out: Any) -> str:
    """Return why a projection does not compute in fp8; empty if it does."""
    if any(_ends(name, end) for end in leave_out):
        return "leave_out"
    if name.rpartition(".")[2] in READ_BY_MIXERS.get(draft.block_config.model_type, ()):
        return "its mixer reads the weight itself"
    for mixture in draft.mixtures:
        if name.startswith(f"{mixture.name}."):
            return "experts use other matrix products"
        within = name.startswith(f"{mixture.name.rpartition('.')[0]}.")
        if within and module.weight.shape[weight_dims(module)[0]] == mixture.count:
            return "routers stay exact"
    if any(size % _MULTIPLE for size in module.weight.shape):
        return f"sizes are no multiples of {_MULTIPLE}"
    return ""


def _refuse_parts(draft: Draft, chosen: tuple[str, ...]) -> None:
    """Report problems (raised when the plan ``draft`` is complete) for projections whose weight gradient is a sum over
    ranks: fp8 would round each term instead of the sum.
    """
    parts = dict[str, str]()
    whole = tuple(f"{name}." for feature in draft.features for name in feature.run_whole)
    for name in chosen:
        cut, partial = draft.rules.get(f"{name}.weight", (None, ()))
        if "tp" in partial or (cut is not None and cut.most_replicas > 1):
            parts[name] = f"tp_size={draft.layout.tp}"
        elif name.startswith(whole):
            parts[name] = draft.layout.describe()
    for asked in dict.fromkeys(parts.values()):
        refused = [name for name in parts if parts[name] == asked]
        names = sorted({name.rpartition(".")[2] for name in refused})
        draft.problem(
            f"mixed_precision='fp8' with {asked}: each rank computes only one term of the weight gradients of "
            f"{', '.join(dict.fromkeys(map(wild_name, refused)))}, and fp8 would round each term instead of their "
            "sum: keep these projections out of fp8, in every layout alike, with "
            f"float8=hfscale.Float8Config(leave_out={names!r})"
        )


def multiplies_in_8_bits(model: Planned) -> bool:
    """Return whether the plan contains linear projections that compute in fp8."""
    return model.plan.feature(ProductsPlan) is not None


def gathers_in_8_bits(model: Planned) -> bool:
    """Return whether data ranks all-gather weights in fp8."""
    return bool(gathered_in_8_bits(model.plan))
