"""Plan the blocks: which module is which role of the blueprint, and what follows for its parameters."""

from collections.abc import Iterator

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .._host.torch import own_parameters
from ..families.blueprint import Block, Blueprint
from ..families.fields import field, first_count, text_config
from ..plan.modules import BlockPlan
from ..plan.parameter import join_path, wild_name
from .draft import Draft
from .experts import blocks_around_experts
from .heads import KEY_VALUE_COUNTS, check_block_heads, check_heads, key_value_copies
from .layers import has_every_list

# (dim of the outputs, dim of the inputs) in the weight of each kind of projection
_WEIGHT_DIMS: dict[type[nn.Module], tuple[int, int]] = {nn.Linear: (0, 1), Conv1D: (1, 0)}

_GROUPS = "num_key_value_groups"


def plan_blocks(draft: Draft, blueprint: Blueprint, layers: list[str]) -> list[BlockPlan]:
    """The blocks of every layer; the rules of their parameters go into ``draft``."""
    blocks: list[BlockPlan] = []
    matched: set[str] = set()  # paths in the blueprint that some layer has
    unfit = blueprint.unfit(draft.config)
    if unfit:
        draft.problem(f"tp_size={draft.tp}: {draft.config.model_type!r} with {unfit}: use tp_size=1")
        return []
    for layer in layers:
        for path, role in blueprint.blocks.items():
            name = f"{layer}.{path}" if path else layer
            if name in draft.modules and _applies(draft, name, role):
                matched.add(path)
                blocks += [_block(draft, *inner, layers) for inner in blocks_around_experts(draft, name, role)]
    for path in blueprint.blocks if has_every_list(draft, blueprint) else ():
        if path and path not in matched:
            draft.problem(
                f"tp_size={draft.tp}: the blueprint of {draft.config.model_type!r} names a block {path!r} that no "
                "layer has: correct the blueprint, or use tp_size=1"
            )
    # Blocks that know their key/value heads were checked one by one.
    keyed = any(_key_value_path(draft, block.name, role) for block in blocks for role in blueprint.blocks.values())
    if blocks and not keyed:
        check_heads(draft, max(role.head_groups for role in blueprint.blocks.values()))
    check_block_heads(draft, blocks)
    return blocks


def _applies(draft: Draft, name: str, role: Block) -> bool:
    """Whether a layer's module is the block meant: one that has none of its parts is another kind of layer."""
    wanted = [*role.column, *role.row, *(child.rpartition(".")[0] for child in role.cut)]
    return not role.optional or any(f"{name}.{child}" in draft.modules for child in wanted)


def _key_value_path(draft: Draft, block: str, role: Block) -> str | None:
    """The first projection of a block that is known to make keys or values."""
    for child, chosen in role.key_value.items():
        parts = role.parts.get(child, 1)
        count = parts if isinstance(parts, int) else len(parts(draft.config))
        if child in role.column and max(chosen, default=0) < max(1, count) and f"{block}.{child}" in draft.modules:
            return f"{block}.{child}"
    return None


def _key_value_copies(draft: Draft, block: str, role: Block) -> int:
    """How many consecutive ranks hold each of the block's key/value heads."""
    path = _key_value_path(draft, block, role)
    if path is None:
        return 1
    copies = key_value_copies(draft, draft.modules[path.rpartition(".")[0]], role.head_groups)
    counted = any(path.rpartition(".")[2] in KEY_VALUE_COUNTS for path in (*role.local_attributes, *role.local_config))
    if copies > 1 and not (counted or _group_attributes(draft, block)):
        draft.problem(
            f"tp_size={draft.tp} is more than the key/value heads, and nothing says how many queries of a rank read "
            f"each in {wild_name(block)}: name its count of key/value heads in the blueprint's local_attributes, or "
            f"use tp_size 1 to {draft.tp // copies}"
        )
    return copies


def _group_attributes(draft: Draft, block: str) -> list[str]:
    """Where, inside a block, stock classes keep how many queries read one key/value head."""
    modules = draft.modules[block].named_modules()
    return [f"{name}.{_GROUPS}".lstrip(".") for name, module in modules if _GROUPS in vars(module)]


def _block(draft: Draft, name: str, role: Block, layers: list[str]) -> BlockPlan:
    copies = _key_value_copies(draft, name, role)
    projections = [(f"{name}.{child}", True) for child in role.column] + [
        (f"{name}.{child}", False) for child in role.row
    ]
    for path, column in projections:
        module = draft.modules.get(path)
        parameter = _parameter_in(draft, name, path.removeprefix(f"{name}.")) if module is None else None
        if parameter is not None and column and role.own_heads:  # the host lists sinks beside projections
            draft.cut(path, 0, parameter.shape[0], (), _copies(role, path.removeprefix(f"{name}."), (), copies))
            continue
        if module is None and role.optional:
            continue
        dims = next((d for kind, d in _WEIGHT_DIMS.items() if isinstance(module, kind)), None)
        if module is None or dims is None:
            found = "nothing" if module is None else type(module).__name__
            draft.problem(
                f"tp_size={draft.tp}: {wild_name(path)} should be a projection (nn.Linear or Conv1D) and is "
                f"{found}: correct the blueprint, or use tp_size=1"
            )
            continue
        dim = dims[0] if column else dims[1]
        parts = _parts(draft, role, name, path, module.weight.shape[dim])
        held = _copies(role, path.removeprefix(f"{name}."), parts, copies)
        draft.cut(f"{path}.weight", dim, module.weight.shape[dim], parts, held)
        if getattr(module, "bias", None) is not None:
            if column:
                draft.cut(f"{path}.bias", 0, module.bias.shape[0], parts, held)
            else:
                draft.rules[f"{path}.bias"] = (None, ("tp",))
    for child, (dim, fused) in role.cut.items():
        parameter = _parameter_in(draft, name, child)
        if parameter is not None:
            length = parameter.shape[dim]
            if child in role.pairs and length // 2 % draft.tp:
                draft.problem(
                    f"tp_size={draft.tp} does not divide the {length // 2} pairs of entries interleaved in "
                    f"{wild_name(f'{name}.{child}')}: use tp_size {_divisors(length // 2)}"
                )
            draft.cut(f"{name}.{child}", dim, length, (length // fused,) * fused if fused > 1 else ())
    once = tuple(f"{name}.{child}" for child in role.once if _parameter_in(draft, name, child) is not None)
    draft.rules.update(dict.fromkeys(once, (None, ("tp",))))
    for child, parameter in draft.modules[name].named_parameters(recurse=False) if role.own_heads else ():
        draft.cut(f"{name}.{child}", 0, parameter.shape[0], (), _copies(role, child, (), copies))
    shared = tuple(path for child in (*role.shared, *role.across) if (path := join_path(name, child)) in draft.modules)
    for path in shared:
        for parameter, _ in draft.modules[path].named_parameters(recurse=False):
            draft.rules[f"{path}.{parameter}"] = (None, ("tp",))
    if role.rest_shared:
        shared += tuple(_roleless_modules(draft, name, tuple(join_path(name, child) for child in role.outside)))
    # What a block that is a module of its own holds must have a role; a layer has parts outside of its blocks.
    whole = () if name in layers else draft.modules[name].named_parameters(prefix=name)
    for parameter, _ in whole:
        outside = any(parameter.startswith(f"{name}.{child}.") for child in role.outside)
        if role.enter == ("",) and parameter not in draft.rules and not outside:
            draft.problem(
                f"tp_size={draft.tp}: {wild_name(parameter)} is inside a block whose blueprint gives it no role: "
                "name its module as column, row or shared in the blueprint, or use tp_size=1"
            )

    def divisor(attribute: str) -> int:
        return draft.tp // copies if attribute.rpartition(".")[2] in KEY_VALUE_COUNTS else draft.tp

    return BlockPlan(
        name=name,
        column=tuple(f"{name}.{child}" for child in role.column if f"{name}.{child}" in draft.modules),
        row=tuple(f"{name}.{child}" for child in role.row if f"{name}.{child}" in draft.modules),
        shared=shared,
        local_attributes=(
            *((path, divisor(path)) for path in role.local_attributes if _has_attribute(draft, name, path, role)),
            *((path, copies) for path in _group_attributes(draft, name) if copies > 1),
        ),
        dropout=max((_probability(draft, path) for path in role.dropout), default=0.0),
        enter=tuple(join_path(name, child) for child in role.enter),
        enter_inputs=role.enter_inputs,
        leave=tuple(path for child in role.leave if (path := join_path(name, child)) in draft.modules) or (name,),
        heads=tuple(role.heads.items()),
        sample_heads=role.sample_heads,
        across=tuple(
            (path, draft.modules[path].weight.shape[-1])
            for child in role.across
            if (path := join_path(name, child)) in draft.modules
        ),
        local_config=tuple((field, divisor(field)) for field in role.local_config),
        copies=copies,
        copied=tuple(join_path(name, child) for child in role.key_value if copies > 1),
        cut_from=None if role.cut_from is None else join_path(name, role.cut_from),
        once=once,
    )


def _copies(role: Block, child: str, parts: tuple[int, ...], copies: int) -> tuple[int, ...]:
    """On how many ranks each of the matrices fused in ``child`` is held; empty where each rank has its own."""
    if copies == 1 or child not in role.key_value:
        return ()
    chosen = role.key_value[child]
    return tuple(copies if not chosen or index in chosen else 1 for index in range(max(1, len(parts))))


def _divisors(count: int) -> str:
    return ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)


def _roleless_modules(draft: Draft, block: str, outside: tuple[str, ...]) -> Iterator[str]:
    """Modules inside a block with parameters of their own that have no rule yet; they get that of shared ones."""
    for path, module in draft.modules[block].named_modules(prefix=block):
        own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if own and path not in outside and not any(name in draft.rules for name in own):
            weight = own_parameters(module).get("weight")
            if weight is not None and weight.ndim == 1 and weight.shape[0] == _hidden_size(draft):
                draft.problem(
                    f"tp_size={draft.tp}: {wild_name(path)} may compute on the output of its block, which is a part of "
                    "a sum there, and the blueprint gives it no role: name it as shared or outside, or use tp_size=1"
                )
            if weight is not None and weight.ndim == 2 and weight.shape[0] == _hidden_size(draft):
                draft.problem(
                    f"tp_size={draft.tp}: {wild_name(path)} may write the output of its block, the blueprint gives "
                    "it no role, and would be counted on every rank: name it as column or row, or use tp_size=1"
                )
            draft.rules.update(dict.fromkeys(own, (None, ("tp",))))
            yield path


def _has_attribute(draft: Draft, block: str, path: str, role: Block) -> bool:
    owner, _, attribute = join_path(block, path).rpartition(".")
    return not role.optional or hasattr(draft.modules.get(owner), attribute)


def _probability(draft: Draft, path: str) -> float:
    """A config field (``attn_config.attn_pdrop``: of a config in it) that may be missing or ``None``."""
    value = draft.config
    for name in path.split("."):
        value = field(value, name)
    return float(value or 0.0)


def _hidden_size(draft: Draft) -> int | None:
    return first_count(text_config(draft.config), ("hidden_size",))


def _parts(draft: Draft, role: Block, block: str, path: str, length: int) -> tuple[int, ...]:
    """Lengths of the matrices fused in a projection along its cut dim of ``length``; empty for one."""
    fused = role.parts.get(path.removeprefix(f"{block}."), 1)
    if not isinstance(fused, int):
        return fused(draft.config)
    if length % fused:
        draft.problem(
            f"tp_size={draft.tp}: the blueprint fuses {fused} equal matrices in {wild_name(path)}.weight, which has "
            f"{length} entries: correct the blueprint, or use tp_size=1"
        )
        return ()
    return (length // fused,) * fused if fused > 1 else ()


def _parameter_in(draft: Draft, block: str, path: str) -> Tensor | None:
    owner, _, attribute = f"{block}.{path}".rpartition(".")
    found: Tensor | None = own_parameters(draft.modules[owner]).get(attribute) if owner in draft.modules else None
    return found
