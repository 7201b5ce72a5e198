"""Read this rank's shard of a parameter that transformers merges from many stored tensors.

Most checkpoints of mixtures of experts store each expert's projections separately, and transformers stacks and
concatenates them into one 3-D parameter. Such a merge moves values and changes none, so the parameter's cuts tell which
slice of each *stored* tensor is this rank's::

    experts.4.gate_proj [2, 3]  ->  gate_up_proj[4, 0:2]      experts.4.up_proj [2, 3]  ->  gate_up_proj[4, 2:4]

transformers is given these slices only, and merges them to the shard: it never reads another rank's experts.
What is merged from weights that are stored quantized may, under adapters, stay in their bytes.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import nn

from .._compat.transformers.stored import Destination, Merge
from ..distributed.files.dequantized import DequantizedOnDisk
from ..distributed.files.reader import PartOnDisk, TensorOnDisk
from ..distributed.files.stored_rows import Source
from ..errors import CheckpointError, ConfigError
from ..features.quantization.plan import packable
from ..plan import ParameterPlan, Plan
from ..plan.cut import Spans, share_spans
from ..plan.quantized import QuantizedPlan
from .stored_forms.scheme import StoredForm

_log = logging.getLogger(__name__)


def merged_parameters(found: Mapping[str, Destination]) -> dict[str, list[tuple[str, Merge]]]:
    """Map parameters that are merged from stored tensors to the keys of these, in the order of the merge."""
    keys: dict[str, list[tuple[str, Destination]]] = {}
    for key, destination in found.items():
        keys.setdefault(destination.name, []).append((key, destination))
    result = {}
    for name, sources in keys.items():
        known = [
            (key, destination.merge)
            for key, destination in sources
            if destination.merge is not None
        ]
        if len(known) == len(sources) and all(
            d.converter is sources[0][1].converter for _, d in sources
        ):
            result[name] = sorted(known, key=lambda source: source[1].source)
    return result


def parts_of_share(
    planned: ParameterPlan,
    sources: Sequence[tuple[str, Merge]],
    stored: Mapping[str, TensorOnDisk],
    ranks: dict[str, int],
) -> dict[str, Any]:
    """Return slices of ``sources`` for transformers to merge into this rank's shard of a parameter."""
    boxes = boxes_of_sources(planned, sources, stored)
    spans = share_spans(planned.shape, planned.cuts, ranks)
    stack = sources[0][1].stack
    shown: dict[str, Any] = {}
    for key, box in boxes.items():
        parts = [_intersection(dim, *edges) for dim, edges in zip(spans, box, strict=True)]
        if stack is not None and not parts.pop(stack):
            continue  # on another rank
        # If this rank has no rows of a source, give an empty slice, so that transformers misses no source.
        shown[key] = PartOnDisk(
            stored[key],
            [part or [(0, 0)] for part in parts],
        )
    if not shown:  # a rank without experts; transformers cannot stack an empty list
        shown[planned.name] = torch.empty(
            planned.local_shape(ranks), dtype=stored[sources[0][0]].dtype
        )
    return shown


def boxes_of_sources(
    planned: ParameterPlan, sources: Sequence[tuple[str, Merge]], stored: Mapping[str, TensorOnDisk]
) -> dict[str, Spans]:
    """Return the box of each stored tensor in the merged one: ``(start, stop)`` per dim."""
    stack = sources[0][1].stack
    join = sources[0][1].join
    boxes: dict[str, Spans] = {}
    offset = 0
    alike = True
    for _, group in groupby(sources, key=lambda source: source[1].source):
        keys = [key for key, _ in group]
        for number, key in enumerate(keys):
            box = [(0, size) for size in stored[key].shape]
            if stack is not None:
                box.insert(stack, (number, number + 1))
                alike = alike and stored[key].shape == stored[keys[0]].shape
            if join is not None:
                box[join] = (offset, offset + box[join][1])
                # Stacked tensors have the same span of the joined dim.
                if stack is None or key == keys[-1]:
                    offset = box[join][1]
            boxes[key] = box
    if not alike or not _cover_all(boxes.values(), planned.shape):
        raise CheckpointError(
            f"{len(boxes)} tensors of the checkpoint, {sources[0][0]} to {sources[-1][0]}, must add up to the model's "
            f"{planned.name} of shape {planned.shape}, and do not: the checkpoint is incomplete, or was saved "
            "with another config"
        )
    return boxes


def _cover_all(boxes: Collection[Spans], shape: tuple[int, ...]) -> bool:
    """Return whether ``boxes`` that do not overlap fill a tensor of ``shape``."""
    reach = tuple(max(stop for _, stop in edges) for edges in zip(*boxes, strict=True))
    volume = sum(prod(stop - start for start, stop in box) for box in boxes)
    return reach == shape and volume == prod(shape)


def _intersection(spans: Spans, low: int, high: int) -> Spans:
    """Return the intersection of ``spans`` with ``low`` to ``high``, relative to ``low``."""
    kept = [
        (
            max(start, low) - low,
            min(stop, high) - low,
        )
        for start, stop in spans
    ]
    return [(start, stop) for start, stop in kept if start < stop]


def plan_as_stored(planned: Plan, model: nn.Module, form: StoredForm) -> Plan:
    """Return the plan with the weights that ``model``'s config says are stored quantized; loading makes them exact."""
    sizes = {
        name: form.bytes_per_value(name, planned.by_name[name].shape)
        for name in packable(planned, model)
    }
    entries = {name: prod(planned.by_name[name].shape) for name, size in sizes.items() if size}
    if not entries:
        raise ConfigError(
            f"quantization_config='as_stored' keeps projections and experts that are stored in {form.method}, and by "
            "its config this model has none: leave it out"
        )
    size = sum(sizes[name] * count for name, count in entries.items()) / sum(entries.values())
    quantized = QuantizedPlan(
        4 if size < 1 else 8, form.method, False, tuple(entries), stored=True, size=size
    )
    return replace(planned, quantized=quantized)


def stored_sources(
    plan: Plan,
    model: nn.Module,
    stored: Mapping[str, TensorOnDisk],
    targets: Mapping[str, Destination],
    tells: bool,
) -> dict[str, list[Source]]:
    """Return the stored weights of each weight that can stay as it is stored; one rank ``tells`` of the others."""
    merged = merged_parameters(targets)
    keys = {target.name: key for key, target in targets.items() if target.converter is None}
    by_name: dict[str, list[Source]] = {}
    for name in packable(plan, model):
        planned = plan.by_name[name]
        if name in merged and merged[name][0][1].stack in (0, None):
            boxes = boxes_of_sources(planned, merged[name], stored)
        elif name in keys and stored[keys[name]].shape == planned.shape:
            boxes = {keys[name]: [(0, size) for size in planned.shape]}
        else:
            continue
        sources = [
            (weight, box)
            for key, box in boxes.items()
            if isinstance(weight := stored[key], DequantizedOnDisk)
        ]
        if len(sources) == len(boxes):
            by_name[name] = sources
    rest = {
        targets[key].name for key, weight in stored.items() if isinstance(weight, DequantizedOnDisk)
    } - by_name.keys()
    if not by_name:
        raise CheckpointError(
            f"quantization_config='as_stored': none of the {len(rest)} weights that are stored quantized can stay so: "
            "leave it out"
        )
    if rest and tells:
        _log.warning(
            "%d weights that are stored quantized cannot stay so and are read as plain values (%s, for one): only "
            "untied projections can, and experts that the host stacks, concatenates or transposes",
            len(rest),
            min(rest),
        )
    return by_name
