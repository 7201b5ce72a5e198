"""Keep frozen weights under adapters quantized, in the bytes of their checkpoint: plan which weights, and find their
stored tensors.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from torch import nn

from ..._compat.transformers.stored import Destination
from ...checkpoint.merged import boxes_of_sources, merged_parameters
from ...checkpoint.stored_forms.scheme import GEMMA, StoredForm
from ...distributed.files.dequantized import DequantizedOnDisk
from ...distributed.files.reader import TensorOnDisk
from ...distributed.mesh import Mesh
from ...errors import CheckpointError, ConfigError
from ...features.quantization.plan import vocabulary_weights, weights_of_experts
from ...plan import ParameterPlan, Plan
from ...plan.quantized import QuantizedPlan
from .rows import Source, StoredRow

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptPlan(QuantizedPlan):
    """Describe the weights that a model holds in the quantized bytes that the checkpoint stores, such as fp8."""

    bytes_per_value: float = 0.0  # mean, scales included
    by_bitsandbytes = False

    @property
    def described(self) -> str:
        """The quantization format in words: ``held as stored (fp8)``, for example."""
        return f"held as stored ({self.kind})"

    def lines(self, by_name: Mapping[str, ParameterPlan]) -> list[str]:
        """Return a line for the printed plan about the quantized weights."""
        return [
            f"quantized: {len(self.weights)} weights in the bytes of their checkpoint ({self.kind}, "
            f"{self.bytes_per_value:.3g} bytes of a value)"
        ]

    def bytes_of(self, name: str, local: Sequence[int], sharded: bool) -> int:
        """Return the bytes of a rank's shard of shape ``local``, scales included."""
        return ceil(prod(local) * self.bytes_per_value)

    def keep(
        self,
        plan: Plan,
        mesh: Mesh,
        model: nn.Module,
        stored: Mapping[str, TensorOnDisk],
        targets: Mapping[str, Destination],
    ) -> tuple[Plan, dict[str, StoredRow]]:
        """Return the plan without those weights that the files do not store quantized, and this rank's shards of the
        weights of the full ``model`` that stay quantized. Warn about stored quantized weights that are dequantized
        instead.
        """
        merged = merged_parameters(targets)
        keys = {target.name: key for key, target in targets.items() if target.converter is None}
        kept: dict[str, list[Source]] = {}
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
                kept[name] = sources
        rest = {
            targets[key].name
            for key, weight in stored.items()
            if isinstance(weight, DequantizedOnDisk)
        } - kept.keys()
        if not kept:
            raise CheckpointError(
                "quantization_config='as_stored' can keep only untied projections and experts quantized, but the "
                f"{len(rest)} quantized weights of this checkpoint are others: leave quantization_config out"
            )
        if rest and mesh.is_first:
            _log.warning(
                "%d quantized weights of the checkpoint cannot stay quantized and are dequantized (%s, for example): "
                "only untied projections can stay quantized, and experts that transformers stacks, concatenates or "
                "transposes",
                len(rest),
                min(rest),
            )
        held = plan.local_names(mesh.pp_rank)
        rows = {
            name: StoredRow(plan.by_name[name], sources, mesh.ranks)
            for name, sources in kept.items()
            if name in held
        }
        return replace(plan, quantized=replace(self, weights=tuple(kept))), rows


def plan_as_stored(planned: Plan, model: nn.Module, form: StoredForm) -> Plan:
    """Return the plan with the names of all weights that stay quantized as stored, judged by the config of ``model``.
    When the checkpoint is loaded, weights that its files do not store quantized are removed from these names.
    """
    shapes = {name: planned.by_name[name].shape for name in packable(planned, model)}
    sizes = {name: bytes_per_value(form, name, shape) for name, shape in shapes.items()}
    entries = {name: prod(shapes[name]) for name, size in sizes.items() if size}
    if not entries:
        raise ConfigError(
            "quantization_config='as_stored' keeps projections and experts that are stored in the format "
            f"{form.method}, but according to its config this checkpoint has none: leave quantization_config out"
        )
    size = sum(sizes[name] * count for name, count in entries.items()) / sum(entries.values())
    quantized = KeptPlan(
        4 if size < 1 else 8, form.method, False, tuple(entries), bytes_per_value=size
    )
    return replace(planned, quantized=quantized)


def packable(planned: Plan, model: nn.Module) -> list[str]:
    """Return the names of weights of the full ``model`` that can be held in the checkpoint's own format: those of
    linear projections and experts, except the head and tied weights.
    """
    linear = {f"{name}.weight" for name, each in model.named_modules() if type(each) is nn.Linear}
    experts = weights_of_experts(planned, model, lambda name: True)
    named = linear.union(experts) - vocabulary_weights(planned)
    return [parameter.name for parameter in planned.parameters if parameter.name in named]


def bytes_per_value(form: StoredForm, name: str, shape: tuple[int, ...]) -> float:
    """Return the mean number of stored bytes per entry of the weight ``name``, including its scales; 0 if the
    config does not quantize this weight.
    """
    if form.method == "mxfp4":
        return 0.5 + 1 / 32 if ".experts." in name else 0.0
    scheme = form.scheme(name)
    names = {name, name.replace(".experts.", ".experts.0.")}
    kept = form.values.get("modules_to_not_convert") or form.values.get("ignore") or ()
    if any(_names(pattern, each.removesuffix(".weight")) for pattern in kept for each in names):
        return 0.0
    if form.method == GEMMA:
        return scheme.bits / 8 + 4 / shape[-1]
    if form.method != "compressed-tensors":
        return 1 + (1 / 32 if form.method == "mxfp8" else 4 / prod(scheme.block or shape[-2:]))
    return scheme.bits / 8 + 2 / (prod(scheme.block) if scheme.block else scheme.group or shape[-1])


def _names(pattern: str, name: str) -> bool:
    """Return whether ``pattern``, which a quantization config excludes from quantization, matches the module ``name``:
    as a regular expression after ``re:``, otherwise as whole components of the dotted name.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."
