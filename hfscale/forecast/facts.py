"""What a search over layouts has to know of a model: read once from the plan of one process, then only arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..config import ParallelConfig
from ..estimate.activations import Types, layer_bytes, stream_width
from ..estimate.memory import estimate_memory
from ..estimate.model_shape import ModelShape
from ..estimate.recompute import is_matrix, trained_names, types_of
from ..plan import Plan
from .jobs import gathered_bytes, gradient_bytes, trained_fraction, unpacked_bytes
from .shapes import shape_of_plan


@dataclass(frozen=True)
class Facts:
    """A model and how it is trained.

    Attributes:
        shape: of its decoder.
        heads: query heads, which tensor ranks share out.
        states: bytes of weights, adapters, gradients and optimizer, for every entry of a weight.
        optimizer: of these, the optimizer's.
        weight: bytes of a weight, likewise.
        width: bytes of a weight while data ranks have it gathered.
        kept: bytes that a layer keeps of a token, on one rank.
        stream: of these, its input.
        kept_alone: likewise without data ranks, where mixed precision is autocast.
        head: bytes of the head's gradient for each of its entries, before it is added up.
        trained: fraction of the entries that trains.
        unpacked: bytes moved for every weight of a quantized base.
        gradient: bytes of a gradient.
        value: bytes of a value of the stream.
        family: the kind of model.
    """

    shape: ModelShape
    heads: int
    states: float
    optimizer: float
    weight: float
    width: float
    kept: float
    stream: float
    kept_alone: float
    head: float
    trained: float
    unpacked: float
    gradient: float
    value: float
    family: str


def facts_of(
    plan: Plan,
    config: Any,
    optimizer: str = "adamw_torch_fused",
    optim_args: Mapping[str, Any] | None = None,
    mixed_precision: str = "no",
) -> Facts:
    """The facts of a plan of one process.

    Raises:
        ConfigError: the optimizer is unknown, or the model has no layers.
    """
    assert plan.layout == ParallelConfig(), "facts are read from the plan of one process"
    shape = shape_of_plan(plan, config)
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or getattr(text, "n_head", None) or 1
    held = estimate_memory(plan, optimizer=optimizer, options=optim_args, mixed_precision=mixed_precision)
    entries = sum(prod(p.shape) for p in plan.owned() if is_matrix(plan, p.name))
    trained = trained_names(plan)
    types = Types(2, 2) if mixed_precision != "no" else types_of(plan, False)
    layer = plan.layers[len(plan.layers) // 2]
    one, alone = (
        layer_bytes(plan, layer, {}, each, trained, routes=shape.routed or None)
        for each in (types, types_of(plan, mixed_precision != "no"))
    )
    return Facts(
        shape=replace(shape, hidden=stream_width(plan, layer)),
        heads=int(heads),
        states=(held.weights + held.adapters + held.gradients + held.optimizer) / entries,
        optimizer=held.optimizer / entries,
        weight=held.weights / entries,
        width=gathered_bytes(plan, mixed_precision != "no"),
        kept=one.kept,
        stream=one.stream,
        kept_alone=alone.kept,
        head=max(4, types.size) if f"{plan.head}.weight" in trained else 0,
        trained=trained_fraction(plan),
        unpacked=unpacked_bytes(plan),
        gradient=gradient_bytes(plan),
        value=types.size,
        family=plan.family,
    )
