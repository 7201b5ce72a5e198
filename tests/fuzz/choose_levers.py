"""Levers that round or scale numbers: fp8, fp16, activations in 8 bits, compressed gradients, rounding by chance: pure.

They are drawn by themselves, behind everything else, and bring along what they cannot do without.
"""

from collections.abc import Callable
from random import Random

from . import lever_values
from .choose_family import fields_of
from .draw import TORCH, Draw


def choose_levers(random: Random, draw: Draw) -> Draw:
    """The same draw, with some of them."""
    for chance, fits, add in _LEVERS:
        if random.random() < chance and fits(draw):
            draw = add(random, draw)
    return draw


def _trains_by_steps(draw: Draw) -> bool:
    """Whether one process can scale, or round, what a step makes."""
    return draw.loop == "train_step" and draw.quantize is None and draw.routing is None


def _float8(random: Random, draw: Draw) -> Draw:
    """In float64, where rounding to 8 bits is the same everywhere; over float32 weights now and then."""
    found = fields_of(draw.family)
    wide = {
        name: size for name, size in lever_values.WIDE.items() if isinstance(found.get(name), int)
    }
    config = {**draw.config, **wide}
    single = draw.optimizer.endswith("bit") or (draw.routing is None and random.random() < 0.2)
    asked = lever_values.float8(random)
    dtype = "float32" if single else "float64"
    # A user's loss is summed, and divided behind the backward pass: no power of two, so 8 bits round what is another.
    # Documents of packed rows share their scales, and the judge computes each by itself.
    draw = draw.change(
        config=config,
        mixed_precision="fp8",
        float8=asked,
        dtype=dtype,
        user_loss=False,
        packed=False,
    )
    return _in_given_microbatches(draw)


def _float16(random: Random, draw: Draw) -> Draw:
    scales = lever_values.loss_scaling(random)
    dtype = "float64" if draw.dtype == "float64" and random.random() < 0.5 else "float32"
    return draw.change(
        mixed_precision="fp16", loss_scaling=scales, dtype=dtype, float8=None, calls=1
    )


def _compressed_activations(random: Random, draw: Draw) -> Draw:
    memory = {**(draw.memory or {}), **lever_values.compress_activations(random)}
    return _in_given_microbatches(draw.change(memory=memory))


def _compressed_gradients(random: Random, draw: Draw) -> Draw:
    asked = lever_values.gradient_compression(random)
    if draw.mixed_precision == "fp16" and asked["gradient_compression"] == "fp16":
        # Scaled gradients may overflow where they are sent in float16, and nowhere else: that step is skipped.
        asked["gradient_compression"] = "bf16"
    again = draw.resume_layout
    if again is not None and again.get("dp_replicate_size", 1) > 1:
        again = {**again, **asked}
    at_once = {
        name: value for name, value in draw.layout.items() if name != "reduce_each_microbatch"
    }
    draw = draw.change(layout={**at_once, **asked}, resume_layout=again)
    if draw.compression != "powersgd":
        return draw
    if (draw.loss_scaling or {}).get("init_scale", 1.0) > 2.0**16:
        # Of a skipped step layers without an overflow of their own keep errors, which the judge does not.
        draw = draw.change(loss_scaling={"init_scale": 2.0**8})
    # Weights that stay: every step's gradient is known then, and what errors make of it can be told.
    still = {
        "optimizer": "SGD",
        "learning_rate": 0.0,
        "steps": 3,
        "dtype": "float64",
        "stochastic_rounding": False,
    }
    if draw.mixed_precision != "fp16":  # whose scale grows, and errors with it
        still |= {"mixed_precision": "no", "loss_scaling": None}
    memory = {
        name: value for name, value in (draw.memory or {}).items() if name in _CHANGES_NOTHING
    }
    # A user's loss is divided behind the backward pass: errors are of sums there.
    return draw.change(memory=memory or None, float8=None, calls=1, user_loss=False, **still)


_CHANGES_NOTHING = ("recompute", "recompute_keep", "offload_activations", "offload_parameters")


def _rounds_by_chance(random: Random, draw: Draw) -> Draw:
    rounds = draw.optimizer in lever_values.BY_CHANCE
    optimizer = draw.optimizer if rounds else lever_values.stochastic_rounding(random)["optimizer"]
    rate = 0.1 if optimizer == "sgd" else 0.01
    narrow = {"dtype": "bfloat16", "mixed_precision": "no", "float8": None, "loss_scaling": None}
    return draw.change(stochastic_rounding=True, optimizer=optimizer, learning_rate=rate, **narrow)


def _in_given_microbatches(draw: Draw) -> Draw:
    """Stages run the microbatches they are given, so that what is scaled, or a block, is that of one process."""
    layouts = [draw.layout, draw.resume_layout or {}]
    if all(layout.get("pp_size", 1) == 1 for layout in layouts):
        return draw
    stages = max(layout.get("pp_size", 1) for layout in layouts)
    # Any schedule takes as many as they are.
    count = max(draw.microbatches // (2 * stages), 1) * 2 * stages
    rows = draw.rows if draw.microbatches else max(1, draw.rows // count)
    first, second = (
        {k: v for k, v in layout.items() if k != "num_microbatches"} for layout in layouts
    )
    return draw.change(layout=first, resume_layout=second or None, microbatches=count, rows=rows)


_Add = Callable[[Random, Draw], Draw]
_LEVERS: list[tuple[float, Callable[[Draw], bool], _Add]] = [
    (0.08, lambda draw: draw.quantize is None and not draw.delayed, _float8),
    (0.06, lambda draw: _trains_by_steps(draw) and draw.mixed_precision != "fp8", _float16),
    (0.06, lambda draw: draw.quantize is None, _compressed_activations),
    (
        0.5,
        lambda draw: _trains_by_steps(draw) and draw.layout.get("dp_replicate_size", 1) > 1,
        _compressed_gradients,
    ),
    (0.05, lambda draw: draw.quantize is None and draw.learning_rate > 0, _rounds_by_chance),
]
"""How often, where it can be, and how."""

assert not set(lever_values.BY_CHANCE) & set(TORCH)
