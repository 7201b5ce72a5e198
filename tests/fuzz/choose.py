"""A draw from a seed and an index alone: pure."""

from random import Random
from typing import Any

from .choose_family import (
    OWN_LOSS,
    SLOW,
    WIDE,
    choose_config,
    choose_family,
    fields_of,
    has_experts,
    linear_names,
)
from .choose_levers import choose_levers
from .choose_more import choose_more
from .choose_prompt import choose_prompt
from .draw import TORCH, Draw
from .layouts import choose_layout, choose_stage_layers, stages_of

_NAMED = (
    "adamw_torch",
    "sgd",
    "adagrad",
    "rmsprop",
    "adafactor",
    "muon",
    "adamw_8bit",
    "lion_8bit",
    "lion_32bit",
)
_FROZEN = (
    "embed",
    "norm",
    "layers.0.",
    "attn",
    "mlp",
    "lm_head",
    "bias",
    "layers.1.",
    "wte",
    "h.0.",
)


def choose(seed: int, index: int) -> Draw:
    """The draw number ``index`` of ``seed``."""
    random = Random(f"{seed}/{index}")
    wild = random.choice((0.0, 0.1, 0.25, 0.5))
    family = choose_family(random)
    found = fields_of(family)
    config = choose_config(random, family, found, wild)
    experts = has_experts({**found, **config})
    layout = choose_layout(random, experts)
    stages = stages_of(layout)
    layers = random.choice((1, 2, 2, 3, 4, 5))
    if layers < stages and random.random() < 0.92:
        layers = stages + random.choice((0, 0, 1, 2))
    if 1 < stages <= layers and random.random() < 0.4:
        layout["stage_layers"] = choose_stage_layers(random, layers, stages)
    draw = Draw(family, config, layers, layout, seed=random.randrange(1000))
    draw = draw.change(**_training(random, draw, experts), **_batches(random, draw))
    draw = _settled(draw.change(**_extras(random, draw)))
    draw = choose_more(Random(f"{seed}/{index}/more"), draw)
    draw = choose_levers(Random(f"{seed}/{index}/levers"), draw)
    return choose_prompt(Random(f"{seed}/{index}/prompt"), draw)


def _training(random: Random, draw: Draw, experts: bool) -> dict[str, Any]:
    named = random.random() < 0.3
    optimizer = random.choice(_NAMED if named else TORCH)
    chosen: dict[str, Any] = {
        "dtype": random.choices(("float64", "bfloat16", "float32"), (75, 16, 9))[0],
        "entry": random.choices(("from_pretrained", "from_config", "parallelize"), (60, 15, 25))[0],
        "steps": random.choice((2, 2, 3)),
        "calls": random.choice((1, 1, 1, 2)),
        "max_norm": random.choice((1.0, 0.05, 0.0, 1.0)),
        "norm_type": random.choice((2.0, 2.0, 2.0, float("inf"), 1.0)),
        "label_smoothing": random.choice((0.0, 0.0, 0.0, 0.1)),
        "optimizer": optimizer,
        "learning_rate": 0.1 if optimizer in ("SGD", "sgd") else 0.01,
        "checkpointing": random.random() < 0.2,
        "attention": random.choice((None, None, "eager")),
    }
    if draw.layout.get("pp_size", 1) == 1 and (draw.family in OWN_LOSS or random.random() < 0.12):
        chosen.update(loop="plain", label_smoothing=0.0)
    if random.random() < 0.08:
        chosen.update(dtype="float32", mixed_precision="bf16")
    if experts and random.random() < 0.2:
        chosen["routing"] = {"balance_loss": 0.01, "z_loss": random.choice((0.0, 1e-3))}
    return chosen


def _batches(random: Random, draw: Draw) -> dict[str, Any]:
    lengths = tuple(
        random.choice((1, 2, 5, 7, 8, 9, 12, 13, 16)) for _ in range(random.choice((1, 1, 2, 3)))
    )
    rows = random.choice((1, 2, 2, 3, 4))
    wanted = draw.layout.get("num_microbatches")
    if draw.layout.get("pp_size", 1) > 1:
        as_dict = random.random() < 0.5
        count = wanted or random.choice((2, 4)) * draw.layout["pp_size"]
        if random.random() < 0.1:  # cut further, or refused
            count = max(1, count // 2)
        rows, microbatches = (rows * count, 0) if as_dict else (rows, count)
    else:
        microbatches = random.choice((0, 1, 2, 3))
    if draw.layout.get("cp_size", 1) > 1 and random.random() < 0.95:
        lengths = tuple(max(length, draw.layout["cp_size"] + 1) for length in lengths)
    return {
        "rows": rows,
        "microbatches": microbatches,
        "lengths": tuple(max(length, 2) for length in lengths)
        if random.random() < 0.9
        else lengths,
        "padding": random.choice(("none", "none", "right", "right", "left")),
        "positions": random.random() < 0.2,
        "packed": random.random() < 0.6,
        "ragged": microbatches > 0 and random.random() < 0.25,
        "masked": random.choice(("none", "some", "some", "rows", "microbatch", "rank")),
        "empty_rank": random.random() < 0.04,
    }


def _extras(random: Random, draw: Draw) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if random.random() < 0.2:
        chosen.update(peft=_lora(random, draw), peft_later=random.random() < 0.4)
        chosen["peft_fresh"] = random.random() < 0.3
    elif random.random() < 0.15:
        chosen["frozen"] = tuple(random.sample(_FROZEN, random.choice((1, 1, 2))))
    if random.random() < (0.12 if draw.family in WIDE else 0):
        chosen.update(_quantized(random, draw))
    chosen["resume"] = random.random() < 0.2
    chosen["between"] = tuple(
        name for name in ("eval", "generate", "save", "deepcopy") if random.random() < 0.12
    )
    return chosen


def _lora(random: Random, draw: Draw) -> dict[str, Any]:
    names = linear_names(draw.family, draw.config, draw.layers)
    targets: Any = "all-linear"
    if names and random.random() < 0.5:
        targets = random.sample(names, random.randint(1, len(names)))
    lora: dict[str, Any] = {"r": random.choice((1, 2, 3, 8)), "target_modules": targets}
    for name in ("use_dora", "use_rslora"):
        if random.random() < 0.15:
            lora[name] = True
    if random.random() < 0.15:
        kept = [name for name in (*names, "norm") if name not in targets]
        lora["modules_to_save"] = [random.choice(kept)]
    if random.random() < 0.1 and "use_dora" not in lora:
        lora["lora_bias"] = True
    return lora


def _quantized(random: Random, draw: Draw) -> dict[str, Any]:
    """A base in few bits, wide enough for blocks to align, with adapters around it."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    found = fields_of(draw.family)
    config = {
        **draw.config,
        **{name: size for name, size in wide.items() if found.get(name) is not None},
    }
    lora = {"r": 4, "target_modules": "all-linear"} if random.random() < 0.9 else None
    kind = random.choice(("nf4", "nf4", "fp4", "int8"))
    still = {
        "mixed_precision": "no",
        "entry": "from_pretrained",
        "dtype": random.choice(("float32", "bfloat16")),
    }
    return {"quantize": kind, "config": config, "peft": lora, "frozen": (), **still}


def _settled(draw: Draw) -> Draw:
    """Choices that exclude each other, made to agree."""
    if draw.optimizer.endswith(("bit", "8bit")) and draw.dtype == "float64":
        draw = draw.change(dtype="float32")
    if draw.empty_rank and draw.distinct == 1:
        draw = draw.change(empty_rank=False)
    if draw.layout.get("pp_size", 1) > 1:
        draw = draw.change(between=tuple(name for name in draw.between if name != "generate"))
    if draw.loop == "plain":
        draw = draw.change(
            masked="some" if draw.masked in ("microbatch", "rank", "rows") else draw.masked,
            routing=None,
        )
        draw = draw.change(
            lengths=tuple(max(length, 5) for length in draw.lengths), empty_rank=False
        )
    if draw.peft is not None:
        # Hfscale in one process says what those losses are, without adapters.
        draw = draw.change(routing=None)
    if draw.family in SLOW:
        draw = draw.change(steps=2, calls=1, rows=min(draw.rows, 8), lengths=draw.lengths[:1])
    if draw.delayed:
        draw = draw.change(resume=False, between=(), calls=1)
    return draw
