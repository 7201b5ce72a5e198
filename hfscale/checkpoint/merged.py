"""Read this rank's shard of a parameter that transformers merges from many stored tensors.

Most checkpoints of mixtures of experts store each expert's projections separately, and transformers stacks and
concatenates them into one 3-D parameter. Such a merge moves values without changing them, so the way in which the
parameter is sharded (its ``cuts``) determines which slice of each *stored* tensor belongs to this rank::

    experts.4.gate_proj [2, 3]  ->  gate_up_proj[4, 0:2]      experts.4.up_proj [2, 3]  ->  gate_up_proj[4, 2:4]

transformers gets only these slices and merges them into the shard, so no rank reads another rank's experts.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch

from .._compat.transformers.stored import Destination, Merge
from ..distributed.files.reader import PartOnDisk, TensorOnDisk
from ..errors import CheckpointError
from ..plan import ParameterPlan
from ..plan.cut import Spans, share_spans


def merged_parameters(found: Mapping[str, Destination]) -> dict[str, list[tuple[str, Merge]]]:
    """Map each parameter that transformers merges from several stored tensors to ``(key, merge)`` of each of these
    tensors, in the order of the merge.
    """
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
    """Return the slices of the stored tensors ``sources`` that transformers has to merge to get this rank's shard of a
    parameter, by key.
    """
    boxes = boxes_of_sources(planned, sources, stored)
    spans = share_spans(planned.shape, planned.cuts, ranks)
    stack = sources[0][1].stack
    shown: dict[str, Any] = {}
    for key, box in boxes.items():
        parts = [_intersection(dim, *edges) for dim, edges in zip(spans, box, strict=True)]
        if stack is not None and not parts.pop(stack):
            continue  # the source belongs to another rank
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
    """Return the box of each stored tensor in the merged tensor: ``(start, stop)`` per dim."""
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
                # Tensors that are stacked have the same span along the concatenated dim.
                if stack is None or key == keys[-1]:
                    offset = box[join][1]
            boxes[key] = box
    if not alike or not _cover_all(boxes.values(), planned.shape):
        raise CheckpointError(
            f"{len(boxes)} tensors of the checkpoint, {sources[0][0]} to {sources[-1][0]}, must together fill the "
            f"model's {planned.name} of shape {planned.shape}, but do not, because the checkpoint is incomplete or was "
            "saved with another config: load all of its files, or pass the config that it was saved with"
        )
    return boxes


def _cover_all(boxes: Collection[Spans], shape: tuple[int, ...]) -> bool:
    """Return whether ``boxes`` that do not overlap fill a tensor of ``shape``."""
    reach = tuple(max(stop for _, stop in edges) for edges in zip(*boxes, strict=True))
    volume = sum(prod(stop - start for start, stop in box) for box in boxes)
    return reach == shape and volume == prod(shape)


def _intersection(spans: Spans, low: int, high: int) -> Spans:
    """Return the index ranges ``spans`` of one dim, cut off at ``low`` and ``high``, and counted from ``low``."""
    kept = [
        (
            max(start, low) - low,
            min(stop, high) - low,
        )
        for start, stop in spans
    ]
    return [(start, stop) for start, stop in kept if start < stop]
