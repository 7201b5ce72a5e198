"""Options and configs away from the default, for scripts/family_sweep.py: which of them a family is run with.

Not the full product: every family takes the next few pairs of (option, config) of one fixed shuffled list of all pairs,
so that families meet different ones and every pair is met by several families. The same in every run.
"""

import random
import zlib
from collections.abc import Iterator
from typing import Any

from hfscale import ParallelConfig
from hfscale.models.clone import HIDDEN, VOCABULARY
from hfscale.models.module_kinds import EXPERT_FIELDS

PICKS = 3  # pairs per family
_SEQUENCE: dict[str, Any] = {"tp_size": 2, "sequence_parallel": True}
# Fields of ParallelConfig that no other part of the sweep sets. What is cut into stages has four layers.
OPTIONS: dict[str, dict[str, Any]] = {
    "gathered again": {**_SEQUENCE, "sequence_regather": True},
    "no overlap": {"tp_size": 2, "overlap": False},
    "the sequence cut, no overlap": {**_SEQUENCE, "overlap": False},
    "cut experts": {"ep_size": 2, "tp_size": 2, "expert_tp_size": 2},
    "weights gathered per microbatch": {"pp_size": 2, "dp_shard_size": 2, "weights_regather": True},
    "gpipe": {"pp_size": 2, "pipeline_schedule": "gpipe"},
    **{
        schedule: {"pp_size": 2, "pipeline_schedule": schedule, "virtual_stages": 2}
        for schedule in (
            "interleaved1f1b",
            "looped_bfs",
            "interleaved_zero_bubble",
            "zbv",
            "dualpipev",
        )
    },
}
_TIED = "tie_word_embeddings"
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_BIASES = (
    "attention_bias",
    "mlp_bias",
    "use_bias",
    "bias",
    "qkv_bias",
    "use_qkv_bias",
    "lm_head_bias",
    "add_bias_linear",
)


def _set(names: tuple[str, ...], value: Any) -> Any:
    return lambda fields: {
        name: value for name in names if isinstance(fields.get(name), int) and fields[name] != value
    }


# Name -> from a config's fields, what to change in it; nothing where it is like that, or has no such field.
CONFIGS: dict[str, Any] = {
    "tied": lambda fields: {_TIED: True} if fields.get(_TIED) is False else {},
    "untied": lambda fields: {_TIED: False} if fields.get(_TIED) is True else {},
    "biases the other way": lambda fields: {
        name: not fields[name] for name in _BIASES if type(fields.get(name)) is bool
    },
    "a padding token within": lambda fields: {"pad_token_id": 5},
    "a padding token at the end": lambda fields: {"pad_token_id": VOCABULARY - 1},
    "one key/value head": _set(_KEY_HEADS, 1),
    "a short window": lambda fields: {"sliding_window": 4} if "sliding_window" in fields else {},
    "as many tokens as hidden units": _set(("vocab_size",), HIDDEN),
    "as many experts as hidden units": _set(EXPERT_FIELDS, HIDDEN),
    "wider heads": _set(("head_dim",), 16),
    "an MLP as wide as the stream": _set(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff"), HIDDEN
    ),
}
_PAIRS = [(option, config) for option in OPTIONS for config in CONFIGS]
random.Random(0).shuffle(_PAIRS)


def pairs(family: str) -> Iterator[tuple[str, str]]:
    """All pairs, beginning where the name of the family puts it."""
    start = zlib.crc32(family.encode())
    for step in range(len(_PAIRS)):
        yield _PAIRS[(start + step) % len(_PAIRS)]


def applies(option: str, fields: dict[str, Any]) -> bool:
    """Whether an option says anything of a family with these fields."""
    return "ep_size" not in OPTIONS[option] or any(
        isinstance(fields.get(name), int) for name in EXPERT_FIELDS
    )


def layout_of(option: str) -> ParallelConfig:
    """The layout with one option set."""
    return ParallelConfig(**OPTIONS[option])


def in_stages(option: str) -> bool:
    """Whether a clone needs layers enough for stages."""
    return "pp_size" in OPTIONS[option]
