"""Draws of one crossing: what a layout keeps between passes, with every kind of projection and adapter: pure.

A first step may be right where the second is not, so each takes three. Ordinary draws have such a pair once in some
hundred.
"""

from random import Random
from typing import Any

from .choose_family import fields_of, linear_names
from .choose_prompt import choose_prompt
from .draw import Draw

PROJECTIONS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "no bias": (("llama", {}), ("mistral", {}), ("qwen3", {})),
    "bias": (
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("starcoder2", {}),
        ("phi", {}),
    ),
    "in the layer": (
        ("opt", {}),
        ("bert", {}),
        ("roberta", {}),
        ("electra", {}),
        ("xglm", {}),
        ("biogpt", {}),
    ),
    "transposed": (("gpt2", {}),),
    "fused": (
        ("phi3", {}),
        ("gpt_neox", {}),
        ("bloom", {}),
        ("falcon", {"bias": True}),
        ("persimmon", {}),
    ),
    "one edge": (("gptj", {}), ("cohere", {}), ("codegen", {})),
    "low rank": (("deepseek_v3", {}),),
    "experts": (("qwen3_moe", {}), ("mixtral", {}), ("qwen2_moe", {})),
    "tied": (("gemma", {}), ("llama", {"tie_word_embeddings": True})),
}
"""Families, with changes to their configs, by the kind of their projections."""

WIDE = ("llama", "mistral", "qwen2", "qwen3", "starcoder2", "phi3", "gemma", "mixtral", "qwen3_moe")
"""Those of which bitsandbytes quantizes a wide clone."""

_STACKED = ("deepseek_v3", "qwen3_moe", "mixtral", "qwen2_moe")
_STACKED_TOGETHER = {"gate_proj", "up_proj"}
"""PEFT adapts both or none where the host has stacked them, one beside the other."""

_WORLDS: tuple[dict[str, Any], ...] = (
    {"tp_size": 2},
    {"tp_size": 2},
    {"tp_size": 2, "dp_shard_size": 2},
    {"tp_size": 2, "dp_replicate_size": 2},
    {"tp_size": 2, "pp_size": 2},
    {"tp_size": 2, "cp_size": 2},
    {"dp_shard_size": 2},
    {"dp_shard_size": 2, "pp_size": 2},
)
_SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "interleaved_zero_bubble", "zbv")


def choose_crossing(seed: int, index: int) -> Draw:
    """The draw number ``index`` of ``seed``."""
    random = Random(f"{seed}/{index}/crossing")
    family, config = random.choice(PROJECTIONS[random.choice(list(PROJECTIONS))])
    layout = _layout(random)
    layers = 4 if "pp_size" in layout else 2
    draw = Draw(
        family, dict(config), layers, layout, steps=3, max_norm=0.0, seed=random.randrange(1000)
    )
    draw = draw.change(
        microbatches=random.choice((2, 4)) if "pp_size" in layout else random.choice((1, 2)),
        calls=random.choice((1, 1, 2)),
        lengths=random.choice(((9,), (7, 12))),
        loop="plain" if "pp_size" not in layout and random.random() < 0.2 else "train_step",
        entry=random.choice(("from_pretrained", "from_pretrained", "parallelize")),
        padding=random.choice(("none", "right")),
    )
    draw = draw.change(**_trained(random, draw), **_kept(random, draw))
    if family in WIDE and random.random() < 0.2:
        draw = _in_four_bits(random, draw)
    elif random.random() < 0.1 and draw.loop == "train_step":
        draw = draw.change(mixed_precision="bf16", dtype="float32")
    return choose_prompt(Random(f"{seed}/{index}/crossing/prompt"), draw)


def _layout(random: Random) -> dict[str, Any]:
    layout = dict(random.choice(_WORLDS))
    if "tp_size" in layout and random.random() < 0.8:
        layout["sequence_parallel"] = True
        layout["sequence_regather"] = random.random() < 0.8
    if "tp_size" in layout and random.random() < 0.1:
        layout["overlap"] = False
    if "pp_size" in layout:
        layout["pipeline_schedule"] = random.choice(_SCHEDULES)
    if "pp_size" in layout and "dp_shard_size" in layout:
        layout["weights_regather"] = random.random() < 0.5
    return layout


def _trained(random: Random, draw: Draw) -> dict[str, Any]:
    """Adapters of some kind, or a frozen part of the model."""
    kind = random.random()
    if kind < 0.15:
        return {"frozen": random.choice(((), ("bias",), ("mlp", "fc"), ("attn", "attention")))}
    names = [
        name for name in linear_names(draw.family, draw.config, draw.layers) if "embed" not in name
    ]
    some = random.sample(names, random.randint(1, len(names)))
    if draw.family in _STACKED and not _STACKED_TOGETHER.isdisjoint(some):
        some = sorted({*some, *_STACKED_TOGETHER})
    lora: dict[str, Any] = {
        "r": random.choice((1, 4)),
        "target_modules": "all-linear" if random.random() < 0.6 or not some else some,
        "bias": random.choice(("none", "none", "all", "lora_only")),
        "fan_in_fan_out": draw.family == "gpt2",
    }
    for name in ("use_dora", "use_rslora"):
        if random.random() < 0.2:
            lora[name] = True
    if random.random() < 0.2 and "use_dora" not in lora:
        lora["lora_bias"] = True
    return {"peft": lora, "peft_later": random.random() < 0.3}


def _kept(random: Random, draw: Draw) -> dict[str, Any]:
    """What the backward pass is given instead of a tensor that is kept."""
    kind = random.random()
    if kind < 0.25:
        return {"checkpointing": True}
    if kind < 0.5:
        return {"memory": {"recompute": random.choice(("full", "selective", 1))}}
    if kind < 0.6:
        return {"memory": {"offload_activations": True}}
    if kind < 0.7 and draw.distinct > 1:
        return {"memory": {"offload_parameters": True}}
    return {}


def _in_four_bits(random: Random, draw: Draw) -> Draw:
    wide = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "moe_intermediate_size": 64,
    }
    found = fields_of(draw.family)
    config = {
        **draw.config,
        **{name: size for name, size in wide.items() if found.get(name) is not None},
    }
    lora = draw.peft or {"r": 4, "target_modules": "all-linear"}
    kept = {
        "quantize": random.choice(("nf4", "fp4", "int8")),
        "dtype": "float32",
        "entry": "from_pretrained",
    }
    return draw.change(config=config, peft={**lora, "bias": "none"}, frozen=(), **kept)
