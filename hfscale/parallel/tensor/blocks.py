"""Plan the tensor-parallel blocks (attention, MLP) of a model, and how their parameters are sharded.

Blocks are found by the model's blueprint: data that say, for each kind of block, which projections are column-parallel
or row-parallel.
"""

from collections.abc import Iterator
from functools import reduce
from math import gcd
from typing import Any

from ...models.blueprint import Block, Blueprint
from ...models.clone import PER_LAYER
from ...models.fields import HEAD_FIELDS, counts, field, first_count, text_config
from ...models.module_kinds import holds_experts
from ...models.names import wild_name
from ...plan.drafting.draft import Draft
from ...plan.drafting.layers import find_lists
from ...plan.modules import BlockPlan
from ...plan.parameter import join_path
from .block_parameters import PlacedBlock, cut_parameters

_GROUPS = "num_key_value_groups"
KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "kv_dim")
"""Attributes and config fields of stock classes for the number of key/value heads, or for their total width."""

_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def plan_blocks(draft: Draft, blueprint: Blueprint, layers: list[str]) -> list[BlockPlan]:
    """Return the plans of the tensor-parallel blocks in all ``layers``: the attention and MLP modules that
    ``blueprint`` describes.

    The sharding rules of the blocks' parameters are added to ``draft``, the plan under construction.
    """
    blocks: list[BlockPlan] = []
    matched: set[str] = set()  # the blueprint's paths that exist in a layer
    unfit = blueprint.unfit(draft.block_config)
    if unfit:
        draft.problem(
            f"tp_size={draft.tp} does not fit {draft.config.model_type!r} with {unfit}: use tp_size=1"
        )
        return []
    for layer in layers:
        for path, role in blueprint.blocks.items():
            name = join_path(layer, path)
            wanted = [
                *role.column,
                *role.row,
                *(child.rpartition(".")[0] for child in role.cut),
            ]
            applies = not role.optional or any(
                f"{name}.{child}" in draft.modules for child in wanted
            )
            if name in draft.modules and applies:
                matched.add(path)
                blocks += [
                    _block(draft, *inner, layers)
                    for inner in blocks_around_experts(draft, name, role)
                ]
    _refuse_unmatched(draft, blueprint, matched)
    # Blocks with projections of keys and values were checked one by one; otherwise check the config's heads.
    keyed = any(
        _key_value_path(draft, block.name, role)
        for block in blocks
        for role in blueprint.blocks.values()
    )
    if blocks and not keyed:
        check_heads(draft, max(role.head_groups for role in blueprint.blocks.values()))
    check_block_heads(draft, blocks)
    return blocks


def _refuse_unmatched(draft: Draft, blueprint: Blueprint, matched: set[str]) -> None:
    """Add a problem if the blueprint, which describes the blocks of the model's layers, names a block that no layer
    has.

    There is no problem if the config sets a kind for each layer (such as attention or recurrence), because the block
    may belong to a kind that this model does not use.
    """
    config = text_config(draft.config)
    if matched and any(field(config, name) for name in PER_LAYER):
        return
    # The model is only a part of the blueprint's architecture: a decoder or one tower.
    if len(find_lists(draft.model, blueprint)) < len(blueprint.layer_lists):
        return
    for path, role in blueprint.blocks.items():
        if path and path not in matched and not role.optional:
            draft.problem(
                f"tp_size={draft.tp}: the blueprint of {draft.config.model_type!r} (how hfscale shards its layers) "
                f"names a block {path!r} that no layer has: correct the blueprint, or use tp_size=1"
            )


def _key_value_path(draft: Draft, block: str, role: Block) -> str | None:
    """Return the name of the first projection that makes keys or values in the attention module ``block``; ``None`` if
    none does.

    ``role`` says which projections of the block make keys and values.
    """
    for child, chosen in role.key_value.items():
        parts = role.parts.get(child, 1)
        count = parts if isinstance(parts, int) else len(parts(draft.block_config))
        if (
            child in role.column
            and max(chosen, default=0) < max(1, count)
            and f"{block}.{child}" in draft.modules
        ):
            return f"{block}.{child}"
    return None


def _key_value_replicas(draft: Draft, block: str, role: Block) -> int:
    """Return how many consecutive ranks hold each of the block's key/value heads."""
    path = _key_value_path(draft, block, role)
    if path is None and not _reads_others_keys(draft, block, role):
        return 1
    attention = draft.modules[block if path is None else path.rpartition(".")[0]]
    replicas = key_value_replicas(draft, attention, role.head_groups)
    counted = any(
        path.rpartition(".")[2] in KEY_VALUE_COUNTS
        for path in (*role.local_attributes, *role.local_config)
    )
    if replicas > 1 and not (counted or _group_attributes(draft, block)):
        draft.problem(
            f"tp_size={draft.tp} exceeds the key/value heads of {wild_name(block)}, so ranks must share these heads, "
            "but the number of queries per key/value head is unknown: name the attribute that counts key/value heads "
            f"in local_attributes of the blueprint, or use tp_size 1 to {draft.tp // replicas}"
        )
    return replicas


def _reads_others_keys(draft: Draft, block: str, role: Block) -> bool:
    """Return whether an attention block has no key projection, and reads the keys of an earlier layer, as in late Gemma
    3n layers.
    """
    makes = (child for child in role.key_value if child in role.column)
    missing = [child for child in makes if f"{block}.{child}" not in draft.modules]
    return bool(missing) and _GROUPS in vars(draft.modules[block])


def _group_attributes(draft: Draft, block: str) -> list[str]:
    """List the attributes of modules inside a block that hold the number of query heads per key/value head, as paths in
    the block.
    """
    modules = draft.modules[block].named_modules()
    return [f"{name}.{_GROUPS}".lstrip(".") for name, module in modules if _GROUPS in vars(module)]


def _block(draft: Draft, name: str, role: Block, layers: list[str]) -> BlockPlan:
    replicas = _key_value_replicas(draft, name, role)
    block = PlacedBlock(draft, name, role, replicas)
    shared, once = cut_parameters(block, is_layer=name in layers)
    config = draft.block_config
    return BlockPlan(
        name=name,
        column=block.modules(role.column),
        row=block.modules(role.row),
        shared=shared,
        local_attributes=_local_attributes(block),
        dropout=max(
            (float(reduce(field, path.split("."), config) or 0.0) for path in role.dropout),
            default=0.0,
        ),
        enter=tuple(map(block.path, role.enter)),
        enter_inputs=role.enter_inputs,
        leave=block.modules(role.leave) or (name,),
        heads=tuple(role.heads.items()),
        sample_heads=role.sample_heads,
        across=tuple(
            (path, draft.modules[path].weight.shape[-1]) for path in block.modules(role.across)
        ),
        local_config=tuple((field, _divisor(block, field)) for field in role.local_config),
        replicas=replicas,
        replicated=block.modules(tuple(role.key_value)) if replicas > 1 else (),
        cut_from=None if role.cut_from is None else block.path(role.cut_from),
        once=once,
    )


def _local_attributes(block: PlacedBlock) -> tuple[tuple[str, int], ...]:
    """List the attributes of a block that are sizes (numbers of heads, widths), each with the number by which a tensor
    rank divides it.
    """
    draft = block.draft
    role = block.role

    def has(path: str) -> bool:
        owner, _, attribute = block.path(path).rpartition(".")
        return not role.optional or hasattr(draft.modules.get(owner), attribute)

    sizes = ((path, _divisor(block, path)) for path in role.local_attributes if has(path))
    groups = (
        (path, block.replicas)
        for path in _group_attributes(draft, block.name)
        if block.replicas > 1
    )
    return (*sizes, *groups)


def _divisor(block: PlacedBlock, attribute: str) -> int:
    """Return the number by which a tensor rank divides ``attribute``, a number of heads or a width of a block.

    This is ``tp_size``, or ``tp_size / replicas`` for a count of key/value heads that several ranks hold.
    """
    tp = block.draft.tp
    return tp // block.replicas if attribute.rpartition(".")[2] in KEY_VALUE_COUNTS else tp


def blocks_around_experts(
    draft: Draft,
    name: str,
    role: Block,
) -> Iterator[tuple[str, Block]]:
    """Yield the tensor-parallel blocks in module ``name``, each with its description: which projections are
    column-parallel, row-parallel and so on.

    Mostly the only block is ``name`` itself, with the description ``role``. In an MoE layer whose tokens are divided
    over the tensor ranks, the blocks are the layer's shared experts.
    """
    inside = [
        path
        for path, module in draft.modules.items()
        if path.startswith(f"{name}.") and holds_experts(module)
    ]
    if not draft.layout.slices_tokens or not inside:
        yield name, role
        return
    children = dict.fromkeys(
        child.rpartition(".")[0] for child in (*role.column, *role.row) if "." in child
    )
    for child in children:
        if f"{name}.{child}" in draft.modules:
            yield f"{name}.{child}", _inner(role, child)


def _inner(role: Block, child: str) -> Block:
    """Return the description (column-parallel projections, row-parallel projections ...) of ``child``, a submodule of a
    block with the description ``role``.
    """

    def within(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            path.removeprefix(f"{child}.") for path in paths if path.startswith(f"{child}.")
        )

    return Block(
        column=within(role.column),
        row=within(role.row),
        parts={path: role.parts[f"{child}.{path}"] for path in within(tuple(role.parts))},
        shared=within(role.shared),
        optional=True,
        dropout=(),
    )


def check_heads(draft: Draft, groups: int) -> None:
    """Add a problem if ``tp_size`` would split an attention head. Heads are in ``groups`` groups, and no head is
    replicated.
    """
    heads, key_heads = _heads_of_config(draft)
    if not heads or not key_heads:
        return
    common = gcd(heads, key_heads) // groups
    if common % draft.tp or not common:
        _refuse(
            draft,
            heads,
            key_heads,
            groups,
            [size for size in range(1, common + 1) if common % size == 0],
        )


def key_value_replicas(draft: Draft, attention: Any, groups: int) -> int:
    """Return how many consecutive ranks hold each key/value head of ``attention``; add a problem if ``tp_size`` would
    split a head.

    The queries of a rank read only the key/value heads of the same rank. ``tp_size`` must divide the number of heads,
    and must divide, or be a multiple of, the number of key/value heads. If there are fewer key/value heads than ranks
    (Shazeer 2019; Ainslie et al. 2023), consecutive ranks hold the same head::

        4 heads, 2 key/value heads, tp4     rank 0: q0 kv0   rank 1: q1 kv0   rank 2: q2 kv1   rank 3: q3 kv1
    """
    heads, key_heads = _heads_of_config(draft)
    if not heads or not key_heads:
        return 1
    # Some layers have other numbers of heads than the config.
    own = first_count(attention, _HEADS) or heads
    per_key_head = getattr(attention, "num_key_value_groups", None)
    shared = own // per_key_head if per_key_head else key_heads if own == heads else own
    heads = own
    key_heads = first_count(attention, _KEY_VALUE_HEADS) or shared
    heads_per_group = heads // groups
    each_key = max(1, key_heads // groups)
    valid = [
        n
        for n in range(1, heads_per_group + 1)
        if heads_per_group % n == 0 and (each_key % n == 0 or n % each_key == 0)
    ]
    if draft.tp not in valid:
        _refuse(draft, heads, key_heads, groups, valid)
        return 1
    return max(1, draft.tp // each_key)


def check_block_heads(draft: Draft, blocks: list[BlockPlan]) -> None:
    """Add a problem if ``tp_size`` does not divide the number of heads of a block, which for an encoder or a tower may
    differ from the number in the config.
    """
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
    """Return the config's numbers of attention heads and of key/value heads. If layers have different numbers, return
    their greatest common divisors.
    """
    config = text_config(draft.config)
    # If the config has this field, the usual field names count the encoder's heads.
    heads = key_heads = counts(config, ("decoder_attention_heads",))
    if not heads:
        heads = counts(config, HEAD_FIELDS)
        key_heads = counts(config, _KEY_VALUE_HEADS) or heads
    return gcd(*heads) or None, gcd(*key_heads) or None


def _refuse(
    draft: Draft,
    heads: int,
    key_heads: int,
    groups: int,
    valid: list[int],
) -> None:
    grouped = f", which come in {groups} groups" if groups > 1 else ""
    draft.problem(
        f"tp_size={draft.tp} does not divide the {heads} attention heads and {key_heads} key/value heads of "
        f"{draft.config.model_type!r}{grouped}: use tp_size {', '.join(map(str, valid)) or 1}"
    )
