"""Keep frozen weights under adapters quantized, in the bytes of their checkpoint: plan which weights, and find their
stored tensors.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from torch import nn

from .._compat.transformers.stored import Destination
from ..distributed.files.dequantized import DequantizedOnDisk
from ..distributed.files.reader import TensorOnDisk
from ..distributed.files.stored_rows import Source
from ..errors import CheckpointError, ConfigError
from ..features.quantization.plan import packable
from ..plan import Plan
from ..plan.quantized import QuantizedPlan
from .merged import boxes_of_sources, merged_parameters
from .stored_forms.scheme import StoredForm

_log = logging.getLogger(__name__)


def plan_as_stored(planned: Plan, model: nn.Module, form: StoredForm) -> Plan:
    """Return the plan with the names of all weights that stay quantized as stored, judged by the config of ``model``.
    When the checkpoint is loaded, weights that its files do not store quantized are removed from these names.
    """
    sizes = {
        name: form.bytes_per_value(name, planned.by_name[name].shape)
        for name in packable(planned, model)
    }
    entries = {name: prod(planned.by_name[name].shape) for name, size in sizes.items() if size}
    if not entries:
        raise ConfigError(
            "quantization_config='as_stored' keeps projections and experts that are stored in the format "
            f"{form.method}, but according to its config this checkpoint has none: leave quantization_config out"
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
    """Return, for each weight that can stay quantized, the stored tensors that contain it. With ``tells``, warn about
    stored quantized weights that are dequantized instead.
    """
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
            "quantization_config='as_stored' can keep only untied projections and experts quantized, but the "
            f"{len(rest)} quantized weights of this checkpoint are others: leave quantization_config out"
        )
    if rest and tells:
        _log.warning(
            "%d quantized weights of the checkpoint cannot stay quantized and are dequantized (%s, for example): only "
            "untied projections can stay quantized, and experts that transformers stacks, concatenates or transposes",
            len(rest),
            min(rest),
        )
    return by_name
