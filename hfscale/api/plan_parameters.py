"""Assemble the plan of every parameter from the rules in the draft."""

from ..models.names import wild_name
from ..parallel.experts.plan import expert_cuts
from ..plan.cut import Cut
from ..plan.drafting.draft import Draft
from ..plan.parameter import ParameterPlan
from ..plan.reductions import data_cut, reductions_of


def assemble_parameters(draft: Draft) -> tuple[ParameterPlan, ...]:
    """Plan every parameter, under every name it has, in the model's order."""
    owners: dict[int, str] = {}
    rules = _rules_of_tensors(draft)
    result = []
    for name, parameter in draft.named():
        owner = owners.setdefault(id(parameter), name)
        cut, partial = rules.get(id(parameter), (None, ()))
        cuts = _cuts(draft, name, tuple(parameter.shape), [cut] if cut is not None else [])
        result.append(
            ParameterPlan(
                name=name,
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                stage=draft.stages.stage_of(name) if draft.stages else 0,
                cuts=tuple(cuts),
                reductions=reductions_of(draft.layout, cuts, partial, _tied_stages(draft, name)),
                tied_to=None if owner == name else owner,
            )
        )
    return tuple(result)


def _cuts(draft: Draft, name: str, shape: tuple[int, ...], tensor: list[Cut]) -> list[Cut]:
    """Return all cuts of a parameter, in order, given those over the tensor axis."""
    if name in draft.spread:
        return expert_cuts(draft.layout, shape, tensor)
    return [*tensor, *(data_cut(draft.layout) if shape else ())]


def _tied_stages(draft: Draft, name: str) -> tuple[int, ...]:
    ties = draft.stages.ties if draft.stages else ()
    return next((tie.stages for tie in ties if name in tie.names), ())


def _rules_of_tensors(draft: Draft) -> dict[int, tuple[Cut | None, tuple[str, ...]]]:
    """Map each tensor's ``id`` to its rule; note a problem if modules that share it have different rules."""
    by_place = {draft.place(name): rule for name, rule in draft.rules.items()}  # one module may have two names
    chosen: dict[int, tuple[str, tuple[Cut | None, tuple[str, ...]] | None]] = {}
    for name, parameter in draft.named():
        rule = by_place.get(draft.place(name))
        first, agreed = chosen.setdefault(id(parameter), (name, rule))
        if rule != agreed:
            draft.problem(
                f"tp_size={draft.tp}: {wild_name(first)} and {wild_name(name)} are one tensor, and would be cut "
                "differently: correct the blueprint, or use tp_size=1"
            )
    return {key: rule for key, (_, rule) in chosen.items() if rule is not None}
