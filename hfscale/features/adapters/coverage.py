"""Report which parameters have adapters, so that the experts of a mixture are not missed."""

from math import prod

from ...plan import Plan
from .plan import coverage

_WORDS = {
    "layers": "parameters of the layers",
    "experts": "expert parameters",
    "embedding": "parameters of the embedding",
    "head": "parameters of the head",
    "other": "other matrices",
}


def describe_coverage(plan: Plan) -> str:
    """Return one line per kind of parameter; trained copies count as adapted."""
    found = coverage(plan)
    trained = sum(prod(plan.by_name[a.name].shape) for a in plan.adapters if a.tied_to is None)
    total = sum(prod(p.shape) for p in plan.owned())
    lines = [f"{trained:,} parameters in adapters, {100 * trained / max(1, total - trained):.2f}% of the model's"]
    for kind, words in _WORDS.items():
        if kind in found:
            covered, entries = found[kind]
            lines.append(f"{100 * covered / max(1, entries):.1f}% of {words} have adapters")
    if found.get("experts", (1, 1))[0] == 0:
        lines.append(
            "no expert has an adapter: name their parameters, like "
            "target_parameters=['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']"
        )
    return "\n".join(lines)
