"""Render a plan as a table, and as JSON for programs."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from math import prod
from typing import Any

from ..config.parallel import AXES
from ..models.names import wild_name
from .columns import aligned
from .contents import PlanContents
from .cut import Cut
from .lines import describe_parts
from .modules import BlockPlan
from .parameter import ParameterPlan

_COLUMNS = (
    "parameter",
    "copies",
    "stage",
    "shape",
    "cut",
    "shape per rank",
    "bytes per rank",
    "gradient",
)
_PLAIN_LOOP = "a plain loop: loss = model(**batch).loss; loss.backward()"
_JSON_NAMES = {"replicas": "copies", "replicated": "copied"}
_WORDS = [
    place
    for place, name in enumerate(_COLUMNS)
    if name not in ("copies", "stage", "bytes per rank")
]


def gradient_rule(parameter: ParameterPlan) -> str:
    """Return the collectives that reduce a parameter's gradient, as a text for the printed plan."""
    return ", ".join(map(str, parameter.reductions)) or "complete"


def describe_cut(parameter: ParameterPlan) -> str:
    """Return how a parameter is sharded, as a text like ``dim 1 / tp2 in 3 parts, dim 0 / dp_shard4``: dim 1 over 2
    tensor ranks, each of 3 fused matrices by itself, and then dim 0 over 4 data ranks. Return ``-`` if it is not
    sharded.
    """
    cuts = []
    for cut in parameter.cuts:
        parts = f" in {len(cut.parts)} parts" if len(cut.parts) > 1 else ""
        held = (
            f", each on {'+'.join(map(str, cut.replicas))} ranks" if cut.most_replicas > 1 else ""
        )
        cuts.append(f"dim {cut.dim} / {cut.axis}{cut.size}{parts}{held}")
    return ", ".join(cuts) or "-"


def local_bytes(parameter: ParameterPlan, ranks: dict[str, int]) -> int:
    """Return the bytes of a parameter's shard on the rank at coordinates ``ranks`` (axis -> rank). A tied tensor is
    counted under its first name: the result is 0 for its other names.
    """
    if parameter.tied_to is not None:
        return 0
    return prod(parameter.local_shape(ranks)) * parameter.dtype.itemsize


def weights_per_rank(plan: PlanContents) -> tuple[int, int]:
    """Return the number of weights, and their bytes, on the rank that holds the most bytes of weights."""

    def weights(rank: int) -> tuple[int, int]:
        once = {p.first_name: p for p in plan.parameters if plan.is_local(rank, p.name)}.values()
        sizes = [(prod(parameter.local_shape({})), parameter.dtype.itemsize) for parameter in once]
        return sum(count for count, _ in sizes), sum(count * size for count, size in sizes)

    return max(
        map(weights, range(plan.layout.pp)),
        key=lambda held: held[1],
    )


def to_json(plan: PlanContents) -> str:
    """Return the plan as JSON. Local shapes and bytes are those of the first rank of each mesh axis, whose shards are
    the largest.
    """
    return json.dumps(
        {
            "family": plan.family,
            "layout": {axis: plan.layout.asked(axis) for axis in AXES},
            "ranks": plan.layout.total_size,
            "weight_bytes_per_rank": weights_per_rank(plan)[1],
            "layers": list(plan.layers),
            "blocks": [_json_fields(block) for block in plan.blocks],
            "experts": [asdict(experts) for experts in plan.experts],
            "streams": [asdict(region) for region in plan.sequence_regions],
            "features": {type(feature).__name__: asdict(feature) for feature in plan.features},
            "stages": asdict(plan.stages) if plan.stages else None,
            "embedding": plan.embedding,
            "head": plan.head,
            "loss": plan.loss,
            "train_step": not plan.no_step,
            "blueprint": plan.source,
            "parameters": [
                {
                    "name": parameter.name,
                    "stage": parameter.stage,
                    "cuts": [_json_fields(cut) for cut in parameter.cuts],
                    "shape": list(parameter.shape),
                    "local_shape": list(parameter.local_shape({})),
                    "dtype": str(parameter.dtype).removeprefix("torch."),
                    "bytes_per_rank": local_bytes(parameter, {}),
                    "partial": list(parameter.partial),
                    "copies": parameter.replicas,
                    "gradient": gradient_rule(parameter),
                    "tied_to": parameter.tied_to,
                }
                for parameter in plan.parameters
            ],
        },
        indent=1,
    )


def _json_fields(data: BlockPlan | Cut) -> dict[str, Any]:
    """Return the fields of a plan's entry as a dict with the names that the JSON output uses."""
    return {_JSON_NAMES.get(name, name): value for name, value in asdict(data).items()}


def render(plan: PlanContents) -> str:
    """Return the printed plan as a text. Parameters that differ only in their layer's number share one line of the
    table.
    """
    folded: dict[tuple[Any, ...], list[ParameterPlan]] = {}
    for parameter in plan.parameters:
        tied = wild_name(parameter.tied_to or "")
        like = (parameter.shape, parameter.dtype, parameter.cuts, parameter.partial, tied)
        folded.setdefault((wild_name(parameter.name), *like), []).append(parameter)
    rows = [_row(group, plan) for group in folded.values()]
    title = (
        f"{plan.family}: {plan.parameter_count:,} parameters "
        f"({human(sum(p.numel * p.dtype.itemsize for p in plan.owned()))}) on {plan.layout.describe()}"
    )
    ranks = f" = {plan.layout.total_size} ranks" if plan.layout.total_size > 1 else ""
    source = [f"blueprint: {plan.source}"] if plan.source else []
    return "\n".join(
        [
            title + ranks,
            *source,
            f"train_step: {f'no ({plan.no_step}); {_PLAIN_LOOP}' if plan.no_step else 'yes'}",
            "",
            *aligned([_COLUMNS, *rows], _WORDS, ruled=True),
            "",
            *describe_parts(plan),
            _memory(plan),
        ]
    )


def _row(group: list[ParameterPlan], plan: PlanContents) -> tuple[str, ...]:
    first = group[0]
    last = group[-1]
    return (
        wild_name(first.name) if len(group) > 1 else first.name,
        str(len(group)),
        str(first.stage) if first.stage == last.stage else f"{first.stage}-{last.stage}",
        _shape(first.shape),
        describe_cut(first),
        _shape(first.local_shape({})),
        human(sum(local_bytes(parameter, {}) for parameter in group))
        if first.tied_to is None
        else "-",
        gradient_rule(first) if first.tied_to is None else _tied(first, plan),
    )


def _tied(parameter: ParameterPlan, plan: PlanContents) -> str:
    ties = plan.stages.ties if plan.stages else ()
    tie = next((tie for tie in ties if parameter.name in tie.names), None)
    copy = (
        f", a copy on stage {parameter.stage}"
        if tie is not None and parameter.stage != tie.owner
        else ""
    )
    return f"tied to {parameter.tied_to}{copy}"


def _memory(plan: PlanContents) -> str:
    count, weights = weights_per_rank(plan)
    which = "largest rank" if plan.stages else "per rank"
    # Some weights are frozen, or take fewer bytes than their shape.
    if plan.quantized is not None or plan.adapters:
        return f"{which}: {count:,} parameters; by kind: hfscale.memory_estimate(plan, tokens=...)"
    return (
        f"{which}: {count:,} parameters; weights {human(weights)} + gradients {human(weights)} + AdamW state "
        f"{human(2 * weights)} = {human(4 * weights)}, before activations"
    )


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def human(size: float) -> str:
    """Return a number of bytes with a binary unit: ``1536`` -> ``1.5 KiB``."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
