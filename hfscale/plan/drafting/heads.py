"""Check which tensor sizes the attention heads allow, and how many ranks hold one key/value head.

The queries of a rank read the key/value heads of that rank. Where there are fewer of those than ranks (multi-query
attention, Shazeer 2019; grouped-query attention, Ainslie et al. 2023), consecutive ranks hold the same one::

    4 heads, 2 key/value heads, tp4     rank 0: q0 kv0   rank 1: q1 kv0   rank 2: q2 kv1   rank 3: q3 kv1
"""

from math import gcd
from typing import Any

from ...models.fields import HEAD_FIELDS, counts, first_count, text_config
from ...models.names import wild_name
from ..modules import BlockPlan
from .draft import Draft

KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "kv_dim")
"""Names under which stock classes keep how many key/value heads there are, or how wide they are together."""

_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def check_heads(draft: Draft, groups: int) -> None:
    """Refuse tensor sizes that would cut a head, where the heads come in ``groups`` that are each cut.

    For layouts in which key/value heads cannot be held by several ranks (they lie among the queries, say).
    """
    heads, key_heads = _heads_of_config(draft)
    if not heads or not key_heads:
        return
    common = gcd(heads, key_heads) // groups
    if common % draft.tp or not common:
        _refuse(draft, heads, key_heads, groups, [size for size in range(1, common + 1) if common % size == 0])


def key_value_replicas(draft: Draft, attention: Any, groups: int) -> int:
    """Return how many consecutive ranks hold each key/value head of the module ``attention``; report sizes that would
    cut a head.

    ``tp_size`` must divide the heads, and divide or be a multiple of the key/value heads.
    """
    heads, key_heads = _heads_of_config(draft)
    if not heads or not key_heads:
        return 1
    # Some layers have other counts than the config's.
    own = first_count(attention, _HEADS) or heads
    per_key_head = getattr(attention, "num_key_value_groups", None)
    shared = own // per_key_head if per_key_head else key_heads if own == heads else own
    heads, key_heads = own, first_count(attention, _KEY_VALUE_HEADS) or shared
    each, each_key = heads // groups, max(1, key_heads // groups)
    valid = [n for n in range(1, each + 1) if each % n == 0 and (each_key % n == 0 or n % each_key == 0)]
    if draft.tp not in valid:
        _refuse(draft, heads, key_heads, groups, valid)
        return 1
    return max(1, draft.tp // each_key)


def check_block_heads(draft: Draft, blocks: list[BlockPlan]) -> None:
    """Refuse the same of blocks whose own count is not the config's (an encoder beside a decoder, a second tower)."""
    if draft.problems:
        return
    for block in blocks:
        holders = [draft.modules[name] for name in (block.name, *block.enter)]
        counts = (getattr(holder, name, None) for holder in holders for name in _HEADS)
        heads = next((count for count in counts if isinstance(count, int)), draft.tp)
        if heads % draft.tp:
            valid = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            draft.problem(
                f"tp_size={draft.tp} does not divide the {heads} attention heads of {wild_name(block.name)}: "
                f"use tp_size {valid}"
            )


def _heads_of_config(draft: Draft) -> tuple[int | None, int | None]:
    """Return heads and key/value heads by the config; their greatest common divisors where layers differ."""
    config = text_config(draft.config)
    heads = key_heads = counts(config, ("decoder_attention_heads",))  # the other names mean the encoder's
    if not heads:
        heads = counts(config, HEAD_FIELDS)
        key_heads = counts(config, _KEY_VALUE_HEADS) or heads
    return gcd(*heads) or None, gcd(*key_heads) or None


def _refuse(draft: Draft, heads: int, key_heads: int, groups: int, valid: list[int]) -> None:
    grouped = f", which come in {groups} groups" if groups > 1 else ""
    draft.problem(
        f"tp_size={draft.tp} does not divide the {heads} attention heads and {key_heads} key/value heads of "
        f"{draft.config.model_type!r}{grouped}: use tp_size {', '.join(map(str, valid)) or 1}"
    )
