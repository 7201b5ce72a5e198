"""A plan as a table for people and as JSON for programs."""

import json
import re
from math import prod
from typing import Any

from .plan import ParameterPlan, Plan


def gradient_rule(parameter: ParameterPlan, plan: Plan) -> str:
    """What is done to the gradient of one parameter before the optimizer sees it."""
    steps = [f"sum over {axis}" for axis in parameter.partial]
    if parameter.cut_over("dp_shard"):
        steps.append("reduce-scatter over dp_shard")
    if plan.layout.size("dp_replicate") > 1:
        steps.append("all-reduce over dp_replicate")
    return ", ".join(steps) or "whole"


def describe_cut(parameter: ParameterPlan) -> str:
    """``tp: dim 0 / 2 in 3 parts``, one entry per axis; ``-`` where the parameter stays whole."""
    cuts = []
    for cut in parameter.cuts:
        parts = f" in {len(cut.parts)} parts" if len(cut.parts) > 1 else ""
        cuts.append(f"{cut.axis}: dim {cut.dim} / {cut.size}{parts}")
    return "; ".join(cuts) or "-"


def local_bytes(parameter: ParameterPlan, ranks: dict[str, int]) -> int:
    """Bytes of one parameter on the rank at ``ranks``; 0 for the second name of a tied tensor."""
    if parameter.tied_to is not None:
        return 0
    return prod(parameter.local_shape(ranks)) * parameter.dtype.itemsize


def to_json(plan: Plan) -> str:
    """The whole plan as JSON; shapes and bytes are those of rank 0, which never has less than another rank."""
    rows = [_row(parameter, plan) for parameter in plan.parameters]
    total = sum(row["bytes_per_rank"] for row in rows)
    layout = {axis: size for axis, size in plan.layout._sizes.items() if axis != "sp"}
    return json.dumps(
        {"family": plan.family, "layout": layout, "weight_bytes_per_rank": total, "parameters": rows}, indent=1
    )


def _row(parameter: ParameterPlan, plan: Plan) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "stage": parameter.stage,
        "cut": describe_cut(parameter),
        "shape": list(parameter.shape),
        "local_shape": list(parameter.local_shape({})),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "bytes_per_rank": local_bytes(parameter, {}),
        "gradient": gradient_rule(parameter, plan),
        "tied_to": parameter.tied_to,
    }


def render(plan: Plan) -> str:
    """The plan as a text table: one line per kind of parameter, the same parameter of like layers folded into one."""
    folded: dict[tuple[Any, ...], list[ParameterPlan]] = {}
    for parameter in plan.parameters:
        pattern = re.sub(r"\.\d+\.", ".*.", parameter.name)
        key = (pattern, parameter.shape, parameter.dtype, parameter.stage, parameter.cuts, parameter.partial)
        folded.setdefault(key, []).append(parameter)
    header = ("parameter", "stage", "cut", "local shape", "bytes per rank", "gradient")
    lines = []
    for (pattern, *_), group in folded.items():
        first = group[0]
        name = f"{pattern} x{len(group)}" if len(group) > 1 else first.name
        gradient = gradient_rule(first, plan) if first.tied_to is None else f"tied to {first.tied_to}"
        size = human(sum(local_bytes(parameter, {}) for parameter in group))
        shape = " x ".join(map(str, first.local_shape({}))) or "scalar"
        lines.append((name, str(first.stage), describe_cut(first), shape, size, gradient))
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    head = "  ".join(cell.ljust(width) for cell, width in zip(header, widths, strict=True)).rstrip()
    weights = sum(local_bytes(parameter, {}) for parameter in plan.parameters)
    count = sum(prod(parameter.local_shape({})) for parameter in plan.owned())
    total = sum(prod(parameter.shape) for parameter in plan.owned())
    title = f"{plan.family}: {total:,} parameters, {plan.layout.describe()} = {plan.layout.total_size} rank(s)"
    summary = (
        f"per rank: {count:,} parameters, weights {human(weights)}, gradients {human(weights)}, "
        f"AdamW state {human(2 * weights)} (before activations)"
    )
    return "\n".join([title, "", head, "-" * len(head), *text, "", summary])


def human(size: float) -> str:
    """Bytes with a binary unit: ``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
