"""Plan the tensor-parallel blocks: match modules with the blueprint's roles, and shard their parameters by them."""

from collections.abc import Iterator

from ...models.blueprint import Block, Blueprint
from ...models.clone import PER_LAYER
from ...models.expert_modules import holds_experts
from ...models.fields import field, text_config
from ...models.names import wild_name
from ...models.partial_outputs import partial_output
from ..modules import BlockPlan
from ..parameter import join_path
from .block_parameters import PlacedBlock, cut_parameters
from .draft import Draft
from .head_sizes import KEY_VALUE_COUNTS, check_block_heads, check_heads, key_value_replicas
from .layers import has_every_list

_GROUPS = "num_key_value_groups"


def plan_tensor(draft: Draft) -> None:
    """Plan the tensor-parallel blocks, by the draft's blueprint."""
    if draft.tp > 1 and (asked := partial_output(draft.config)):
        draft.problem(f"tp_size={draft.tp}: the config's {asked}: set it to False, or use tp_size=1")
    if draft.tp > 1 and draft.blueprint:
        draft.blocks = plan_blocks(draft, draft.blueprint, draft.layers)


def plan_blocks(draft: Draft, blueprint: Blueprint, layers: list[str]) -> list[BlockPlan]:
    """Return the blocks of every layer; add the rules of their parameters to ``draft``."""
    blocks: list[BlockPlan] = []
    matched: set[str] = set()  # paths in the blueprint that some layer has
    unfit = blueprint.unfit(draft.block_config)
    if unfit:
        draft.problem(f"tp_size={draft.tp}: {draft.config.model_type!r} with {unfit}: use tp_size=1")
        return []
    for layer in layers:
        for path, role in blueprint.blocks.items():
            name = join_path(layer, path)
            if name in draft.modules and _applies(draft, name, role):
                matched.add(path)
                blocks += [_block(draft, *inner, layers) for inner in blocks_around_experts(draft, name, role)]
    _refuse_unmatched(draft, blueprint, matched)
    # Blocks that know their key/value heads were checked one by one.
    keyed = any(_key_value_path(draft, block.name, role) for block in blocks for role in blueprint.blocks.values())
    if blocks and not keyed:
        check_heads(draft, max(role.head_groups for role in blueprint.blocks.values()))
    check_block_heads(draft, blocks)
    return blocks


def _refuse_unmatched(draft: Draft, blueprint: Blueprint, matched: set[str]) -> None:
    """Refuse a block that no layer has, unless the config lists kinds of layers and may leave this one out."""
    config = text_config(draft.config)
    if matched and any(field(config, name) for name in PER_LAYER):
        return
    for path, role in blueprint.blocks.items() if has_every_list(draft, blueprint) else ():
        if path and path not in matched and not role.optional:
            draft.problem(
                f"tp_size={draft.tp}: the blueprint of {draft.config.model_type!r} names a block {path!r} that no "
                "layer has: correct the blueprint, or use tp_size=1"
            )


def _applies(draft: Draft, name: str, role: Block) -> bool:
    """Return whether a layer's module is the block meant by ``role``: it has at least one of its projections."""
    wanted = [*role.column, *role.row, *(child.rpartition(".")[0] for child in role.cut)]
    return not role.optional or any(f"{name}.{child}" in draft.modules for child in wanted)


def _key_value_path(draft: Draft, block: str, role: Block) -> str | None:
    """Return the first projection of a block that makes keys or values, by its role; ``None`` if there is none."""
    for child, chosen in role.key_value.items():
        parts = role.parts.get(child, 1)
        count = parts if isinstance(parts, int) else len(parts(draft.block_config))
        if child in role.column and max(chosen, default=0) < max(1, count) and f"{block}.{child}" in draft.modules:
            return f"{block}.{child}"
    return None


def _key_value_replicas(draft: Draft, block: str, role: Block) -> int:
    """Return how many consecutive ranks hold each of the block's key/value heads."""
    path = _key_value_path(draft, block, role)
    if path is None:
        return 1
    replicas = key_value_replicas(draft, draft.modules[path.rpartition(".")[0]], role.head_groups)
    counted = any(path.rpartition(".")[2] in KEY_VALUE_COUNTS for path in (*role.local_attributes, *role.local_config))
    if replicas > 1 and not (counted or _group_attributes(draft, block)):
        draft.problem(
            f"tp_size={draft.tp} is more than the key/value heads, and nothing says how many queries of a rank read "
            f"each in {wild_name(block)}: name its count of key/value heads in the blueprint's local_attributes, or "
            f"use tp_size 1 to {draft.tp // replicas}"
        )
    return replicas


def _group_attributes(draft: Draft, block: str) -> list[str]:
    """List the attributes inside a block that hold the number of query heads per key/value head."""
    modules = draft.modules[block].named_modules()
    return [f"{name}.{_GROUPS}".lstrip(".") for name, module in modules if _GROUPS in vars(module)]


def _block(draft: Draft, name: str, role: Block, layers: list[str]) -> BlockPlan:
    replicas = _key_value_replicas(draft, name, role)
    block = PlacedBlock(draft, name, role, replicas)
    shared, once = cut_parameters(block, is_layer=name in layers)
    return BlockPlan(
        name=name,
        column=block.modules(role.column),
        row=block.modules(role.row),
        shared=shared,
        local_attributes=_local_attributes(block),
        dropout=max((_probability(draft, path) for path in role.dropout), default=0.0),
        enter=tuple(map(block.path, role.enter)),
        enter_inputs=role.enter_inputs,
        leave=block.modules(role.leave) or (name,),
        heads=tuple(role.heads.items()),
        sample_heads=role.sample_heads,
        across=tuple((path, draft.modules[path].weight.shape[-1]) for path in block.modules(role.across)),
        local_config=tuple((field, _divisor(block, field)) for field in role.local_config),
        replicas=replicas,
        replicated=tuple(block.path(child) for child in role.key_value if replicas > 1),
        cut_from=None if role.cut_from is None else block.path(role.cut_from),
        once=once,
    )


def _local_attributes(block: PlacedBlock) -> tuple[tuple[str, int], ...]:
    """List the attributes that the block's forward reads as local sizes, with their divisors."""
    draft, name, role = block.draft, block.name, block.role
    sizes = ((path, _divisor(block, path)) for path in role.local_attributes if _has_attribute(draft, name, path, role))
    groups = ((path, block.replicas) for path in _group_attributes(draft, name) if block.replicas > 1)
    return (*sizes, *groups)


def _divisor(block: PlacedBlock, attribute: str) -> int:
    """Return the divisor of a local size: ``tp_size``, or less for counts of replicated key/value heads."""
    tp = block.draft.tp
    return tp // block.replicas if attribute.rpartition(".")[2] in KEY_VALUE_COUNTS else tp


def _has_attribute(draft: Draft, block: str, path: str, role: Block) -> bool:
    owner, _, attribute = join_path(block, path).rpartition(".")
    return not role.optional or hasattr(draft.modules.get(owner), attribute)


def _probability(draft: Draft, path: str) -> float:
    """Return a probability of the config (``attn_config.attn_pdrop``: of a nested config); 0 if missing or ``None``."""
    value = draft.block_config
    for name in path.split("."):
        value = field(value, name)
    return float(value or 0.0)


def blocks_around_experts(draft: Draft, name: str, role: Block) -> Iterator[tuple[str, Block]]:
    """Yield the blocks that the tensor axis shards in block ``name``.

    That is the block itself; or, if tensor ranks hold full experts in it, its shared experts, each as a block: inputs,
    outputs and router of the mixture are replicated then.
    """
    inside = [
        found for found, module in draft.modules.items() if found.startswith(f"{name}.") and holds_experts(module)
    ]
    if not draft.layout.slices_tokens or not inside:
        yield name, role
        return
    children = dict.fromkeys(child.rpartition(".")[0] for child in (*role.column, *role.row) if "." in child)
    for child in children:
        if f"{name}.{child}" in draft.modules:
            yield f"{name}.{child}", _inner(role, child)


def _inner(role: Block, child: str) -> Block:
    """Return the part of a block's role that concerns its module ``child``."""

    def within(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(path.removeprefix(f"{child}.") for path in paths if path.startswith(f"{child}."))

    return Block(
        column=within(role.column),
        row=within(role.row),
        parts={path: role.parts[f"{child}.{path}"] for path in within(tuple(role.parts))},
        shared=within(role.shared),
        optional=True,
        dropout=(),
    )
