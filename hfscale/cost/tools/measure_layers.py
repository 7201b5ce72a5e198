"""Measure the activation bytes of a model's own layers, in full size, on one rank of a layout.

The training code builds the first layers of the model's own class on the meta device, as one rank of the layout
(:mod:`.simulated_rank`), and runs a step on one or two sequences, in which saved-tensor hooks record the tensors that
each layer keeps. A whole run keeps these bytes times the numbers of layers, sequences and microbatches in flight. The
numbers of layers, stages and data-parallel ranks are reduced, because a layer's bytes do not depend on these numbers.
"""

import json
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch import storage_key, tree_leaves
from ..._compat.transformers.hidden_states import hidden_states_of
from ..._compat.transformers.implementations import implementation_of
from ...config.memory import MemoryConfig
from ...config.parallel import ParallelConfig
from ...errors import ConfigError
from ...features.memory.kept_activations import KeptActivations
from ...features.memory.saved import SavedCounter
from ...features.memory.stored import Stored
from ...models.clone import first_layers
from ...plan import Plan
from ...plan.feature_plans import BYTES, compressed, recomputed
from ...train.runtime import runtime_of
from ..model.job import job_of
from ..model.layer_bytes import is_known
from ..model.model_shape import shape_of_plan
from ..model.situation import Kind, LayerBytes, MeasuredLayers, kind_of
from .simulated_rank import RunSpec, meta_model, take_step

_MOST_LAYERS = 16  # layers that are searched for different kinds
_BEFORE = "before"
_BEHIND = "behind"
_SHARED = "shared"
_LOGITS = "logits"
_SEEN: dict[tuple[str, ...], MeasuredLayers | None] = {}
_log = logging.getLogger(__name__)


def measured_layers(
    plan: Plan, spec: RunSpec, sequence: int, batch: int = 1, layout: ParallelConfig | None = None
) -> MeasuredLayers | None:
    """Measure the activation bytes of a model's layers on one rank of ``layout``, by default the plan's layout.

    Return ``None`` if a formula gives the bytes of all layers, or if they cannot run on the meta device. At most two
    sequences run: more sequences keep proportionally more, but a single one may keep less.
    """
    if all(is_known(plan, layer) for layer in plan.layers):
        return None
    first = dict[Kind, int]()  # kind -> its first layer that follows another layer
    for index, layer in enumerate(plan.layers[1:_MOST_LAYERS], 1):
        first.setdefault(kind_of(plan, layer), index)
    few = replace(
        spec,
        config=first_layers(
            spec.config,
            max(first.values(), default=0) + 1,
        ),
        memory=None,
    )
    small, again, least = _small(layout or plan.layout), recomputed(plan), compressed(plan)
    sizes = {"sequence": sequence, "batch": min(batch, 2), "microbatches": 1}
    parts: dict[str, Any] = {}
    if any((again.attention, again.modules, again.elementwise)):
        assert spec.memory is not None
        how = "elementwise" if again.elementwise else spec.memory.recompute
        parts = {"recompute": how, "tile_tokens": again.tile or None}

    def seen(**memory: Any) -> MeasuredLayers | None:
        return _measured_once(
            replace(few, memory=MemoryConfig(**memory)) if memory else few, small, sizes
        )

    measured = whole = seen()
    if parts and whole is not None and (measured := seen(**parts)) is not None:
        layers = {
            kind: _with_again(part, whole.layers[kind]) for kind, part in measured.layers.items()
        }
        measured = replace(measured, first=_with_again(measured.first, whole.first), layers=layers)
    if measured is None or least is None:
        return measured
    in_8_bits = seen(**parts, compress_activations=str(least))
    return None if in_8_bits is None else replace(measured, in_8_bits=in_8_bits)


def _small(layout: ParallelConfig) -> ParallelConfig:
    """Return the layout with as few stages and data-parallel ranks as possible without changing the activation bytes of
    a layer.
    """
    data = max(layout.expert_batches, min(2, layout.batch_world))
    few: dict[str, Any] = {"pp_size": 1, "dp_replicate_size": 1, "dp_shard_size": data}
    few |= {
        "pipeline_schedule": "1f1b",
        "virtual_stages": 1,
        "stage_layers": None,
        "num_microbatches": None,
    }
    return replace(layout, **few, gradient_compression="no", powersgd_rank=None)


def _measured_once(
    spec: RunSpec, layout: ParallelConfig, sizes: dict[str, int]
) -> MeasuredLayers | None:
    """Measure the activation bytes of one layer of each kind (equal names and shapes of parameters), in a batch of the
    given ``sizes``; results are cached in this process.
    """
    config = json.dumps(spec.config.to_dict(), sort_keys=True, default=str)
    key = (
        config + implementation_of(spec.config),
        repr(replace(spec, config=None)),  # type: ignore[arg-type]
        repr(layout),
        repr(sizes),
    )
    if key not in _SEEN:
        try:
            _SEEN[key] = _count(spec, layout, sizes)
        except Exception as error:  # of any type: classes may fail on the meta device
            _log.info("layers of %s cannot be measured: %s", spec.config.model_type, error)
            _SEEN[key] = None
    return _SEEN[key]


def _count(spec: RunSpec, layout: ParallelConfig, sizes: dict[str, int]) -> MeasuredLayers:
    if layout.total_size > 1 and dist.is_initialized():
        raise ConfigError(
            "measuring with simulated ranks needs a process in which torch.distributed is not initialized, but it is: "
            "measure in a separate process"
        )
    with meta_model(spec, layout) as (model, copies):
        plan = runtime_of(model).plan
        job = job_of(plan, **sizes, mixed=spec.mixed_precision)
        counter = _LayerCounter(model, plan.layers, plan.head, copies)
        counter.follow(runtime_of(model).part(KeptActivations))
        take_step(model, job, shape_of_plan(plan, spec.config), counter, spec.mixed_precision)
        layers = {
            layer: LayerBytes(
                kept=counter.kept[layer] / job.tokens,
                stream=counter.streams[layer] / job.tokens,
                counted=True,
                as_input=counter.inputs[layer] / job.tokens,
                piece=counter.pieces[layer] / job.tokens,
                passing=(counter.streams[layer] + counter.pieces[layer]) / job.tokens,
            )
            for layer in plan.layers
        }
        measured = MeasuredLayers(
            first=layers[plan.layers[0]],
            layers={kind_of(plan, layer): layers[layer] for layer in plan.layers},
            shared=counter.kept[_SHARED] / job.tokens,
            before=counter.kept[_BEFORE] / job.tokens,
            behind=counter.most[_BEHIND] / job.tokens,
        )
    return measured


def _with_again(part: LayerBytes, whole: LayerBytes) -> LayerBytes:
    """Return the bytes of a layer that recomputes some of its operations: it keeps ``part`` and, while it is
    recomputed, everything that it keeps without recomputation (``whole``).
    """
    return replace(part, again=max(0.0, whole.kept - part.kept))


class _LayerCounter(SavedCounter):
    """Count the bytes of the tensors that each layer saves for its backward pass. A tensor that several layers save
    counts for the first one.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        head: str | None,
        copies: Collection[int],
    ) -> None:
        # kept and most (at once): layer, or name of a part outside the layers -> bytes
        # streams: layer -> bytes of its input, as kept if the layer is recomputed
        self.kept, self.most, self.streams = Counter[str](), Counter[str](), dict[str, float]()
        # pieces: layer -> the most bytes that its backward pass reads at once
        # inputs: layer -> bytes of its unchanged input among the saved tensors
        self.inputs, self.pieces, self._read = Counter[str](), Counter[str](), Counter[str]()
        self._inputs, self._reading, self._rounds = (
            dict[str, int](),
            dict[int, tuple[str, int]](),
            False,
        )
        self._names = {id(model.get_submodule(name)): name for name in layers}
        self._place = _BEFORE
        self._done = False
        self._given = dict[int, Tensor]()  # inputs that layers share, other than hidden states
        super().__init__(model, layers, head, self._count_kind, copies)

    def enter(
        self,
        layer: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        self._place = self._names[id(layer)]
        stream = hidden_states_of(args, kwargs)
        self.streams[self._place] = stream.numel() * (
            BYTES if self._rounds else stream.element_size()
        )
        given = (
            tensor
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, Tensor) and tensor is not stream
        )
        self._given |= {storage_key(tensor): tensor for tensor in given}
        before = self.kept[self._place]
        super().enter(layer, args, kwargs)
        self.inputs[self._place] = self.kept[self._place] - before
        self._inputs[self._place] = storage_key(stream)

    def leave(self, *args: Any) -> None:
        super().leave(*args)
        self._place = _BEHIND

    def kind_of(self, tensor: Tensor) -> str:
        """Return the name of the layer that is saving a tensor. Outside the layers, return ``"before"`` or ``"behind"``
        (modules before or after the layers), ``"shared"`` (an input that layers share, such as positions) or
        ``"logits"``.
        """
        if storage_key(tensor) in self._given:
            return _SHARED
        if self._place == _BEHIND and (
            self.is_of_head(tensor) or self.head_shape[:1] == tensor.shape[-1:] != ()
        ):
            return _LOGITS
        return self._place

    def unpack(self, saved: Any) -> Tensor:
        """Return a saved tensor to the backward pass, and count its bytes as read until the last operation that saved
        it has run.
        """
        # norms that cast their input to 32 bits keep the copy instead of the input
        if not self._done:
            self._done = True
            self.inputs = Counter(
                {
                    name: self.inputs[name]
                    for name, key in self._inputs.items()
                    if self.saved_as(key)
                }
            )
        tensor = super().unpack(saved)
        key = storage_key(tensor)
        kind = self.saved_as(key)
        # The tensor exists until the last operation that saved it has read it.
        if kind is not None and key not in self._reading:
            self._reading[key] = kind, tensor.untyped_storage().nbytes()
            self._reads(*self._reading[key])
        return tensor

    def freed(self, key: int) -> None:
        kind, size = self._reading.pop(key, ("", 0))
        self._reads(kind, -size)

    def follow(self, part: KeptActivations | None) -> None:
        """Also count the activations that ``part`` stores in 8 bits; saved-tensor hooks do not see them."""
        if part is None or not part.rounds:
            return
        store, known, self._rounds = part.store, set[int](), True

        def counting(values: int, tensor: Tensor, stays_exact: bool) -> Stored | None:
            stored = store(values, tensor, stays_exact)
            key = storage_key(tensor)
            if stored is not None:
                self._count_kind(self._place, stored.size)
            elif key not in known:
                known.add(key)
                self._count_kind(self._place, tensor.untyped_storage().nbytes())
            return stored

        part.store = counting  # type: ignore[method-assign]

    def _reads(self, kind: str, size: int) -> None:
        self._read[kind] += size
        self.pieces[kind] = max(self.pieces[kind], self._read[kind])

    def _count_kind(self, kind: str, size: int) -> None:
        self.most[kind] = max(self.most[kind], self.kept[kind] + size)
        if not self._done or kind == _BEHIND:
            self.kept[kind] += size
