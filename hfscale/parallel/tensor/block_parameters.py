"""Derive how each parameter of a tensor-parallel block (attention, MLP) is sharded, or why the block cannot be sharded.

Each block has an entry in the model's blueprint, which says which of its projections are column-parallel, row-parallel
or replicated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..._compat.torch import own_parameters
from ...models.blueprint import Block
from ...models.fields import first_count, text_config
from ...models.module_kinds import PROJECTIONS, weight_dims
from ...models.names import wild_name
from ...plan.drafting.draft import Draft
from ...plan.parameter import join_path

# the rule of a replicated parameter of which each rank computes a partial gradient
_PARTIAL: tuple[None, tuple[str, ...]] = (None, ("tp",))


@dataclass(frozen=True)
class PlacedBlock:
    """Describe one tensor-parallel block (attention, MLP) of a model, with the plan that its parameters
    are added to.
    """

    draft: Draft  # the model's plan under construction
    name: str  # the name of the block's module
    role: Block  # the block's entry in the blueprint
    replicas: int  # how many consecutive ranks hold each of the block's key/value heads

    def path(self, child: str) -> str:
        """Return the full name of ``child``, a path inside the block."""
        return join_path(self.name, child)

    def modules(self, children: tuple[str, ...]) -> tuple[str, ...]:
        """Return the full names of those ``children`` that are modules of this block."""
        return tuple(path for child in children if (path := self.path(child)) in self.draft.modules)

    def parameter(self, path: str) -> Tensor | None:
        """Return the parameter at ``path`` inside the block; ``None`` if there is none."""
        owner, _, attribute = self.path(path).rpartition(".")
        modules = self.draft.modules
        return own_parameters(modules[owner]).get(attribute) if owner in modules else None

    def parts_replicas(
        self,
        child: str,
        parts: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        """Return how many ranks hold each shard of the matrices fused in ``child``, one number per matrix.

        Return an empty tuple if every shard is on one rank.
        """
        if self.replicas == 1 or child not in self.role.key_value:
            return ()
        chosen = self.role.key_value[child]
        return tuple(
            self.replicas if not chosen or index in chosen else 1
            for index in range(max(1, len(parts)))
        )


def cut_parameters(block: PlacedBlock, is_layer: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Add the sharding rules of a block's parameters to ``block.draft``, the plan under construction.

    Returns:
        The modules that every rank holds in full, and the parameters that exactly one rank adds to the block's output:
        the output is summed over ranks, and the sum must count such a parameter once.
    """
    draft = block.draft
    role = block.role
    for child in role.column:
        _cut_projection(block, child, column=True)
    for child in role.row:
        _cut_projection(block, child, column=False)
    for child, (dim, fused) in role.cut.items():
        _cut_other(block, child, dim, fused)
    once = tuple(block.path(child) for child in role.once if block.parameter(child) is not None)
    draft.rules.update(dict.fromkeys(once, _PARTIAL))
    if role.own_heads:
        for child, parameter in draft.modules[block.name].named_parameters(recurse=False):
            draft.cut(
                block.path(child),
                0,
                parameter.shape[0],
                (),
                block.parts_replicas(child),
            )
    shared = block.modules((*role.shared, *role.across))
    for path in shared:
        for parameter, _ in draft.modules[path].named_parameters(recurse=False):
            draft.rules[f"{path}.{parameter}"] = _PARTIAL
    if role.rest_shared:
        shared += tuple(_share_rest(block))
    if not is_layer:
        _refuse_roleless(block)
    return shared, once


def _cut_projection(block: PlacedBlock, child: str, column: bool) -> None:
    draft = block.draft
    role = block.role
    path = block.path(child)
    module = draft.modules.get(path)
    if (
        module is None
        and column
        and role.own_heads
        and (parameter := block.parameter(child)) is not None
    ):
        # transformers' plan lists attention sinks, which are parameters, next to projections
        draft.cut(path, 0, parameter.shape[0], (), block.parts_replicas(child))
        return
    if module is None and role.optional:
        return
    if not isinstance(module, PROJECTIONS):
        kind = "nothing" if module is None else type(module).__name__
        draft.problem(
            f"tp_size={draft.tp}: the blueprint (how hfscale shards a model's layers) says that {wild_name(path)} is "
            f"a projection (nn.Linear or Conv1D), but it is {kind}: correct the blueprint, or use tp_size=1"
        )
        return
    dim = weight_dims(module)[0 if column else 1]
    parts = _fused_lengths(block, child, module.weight.shape[dim])
    replicas = block.parts_replicas(child, parts)
    draft.cut(f"{path}.weight", dim, module.weight.shape[dim], parts, replicas)
    if getattr(module, "bias", None) is not None:
        if column:
            draft.cut(f"{path}.bias", 0, module.bias.shape[0], parts, replicas)
        else:
            draft.rules[f"{path}.bias"] = _PARTIAL


def _fused_lengths(block: PlacedBlock, child: str, length: int) -> tuple[int, ...]:
    """Return the lengths of the matrices fused in a projection along its sharded dim, which has ``length`` entries.

    Return an empty tuple if the projection is a single matrix.
    """
    draft = block.draft
    fused = block.role.parts.get(child, 1)
    if not isinstance(fused, int):
        return fused(draft.block_config)
    if length % fused:
        draft.problem(
            f"tp_size={draft.tp}: the blueprint (how hfscale shards a model's layers) says that {fused} equal "
            f"matrices are fused in {wild_name(block.path(child))}.weight, but its {length} entries do not divide "
            "evenly: correct the blueprint, or use tp_size=1"
        )
        return ()
    return (length // fused,) * fused if fused > 1 else ()


def _cut_other(block: PlacedBlock, child: str, dim: int, fused: int) -> None:
    """Shard a parameter that belongs to no projection, for example a stack of one matrix per expert."""
    draft = block.draft
    path = block.path(child)
    parameter = block.parameter(child)
    if parameter is None:
        return
    length = parameter.shape[dim]
    pairs = length // 2
    if child in block.role.pairs and pairs % draft.tp:
        valid = ", ".join(str(size) for size in range(1, pairs + 1) if pairs % size == 0)
        draft.problem(
            f"tp_size={draft.tp} does not divide the {pairs} pairs of interleaved entries of {wild_name(path)}, which "
            f"must stay on one rank: use tp_size {valid}"
        )
    draft.cut(
        path,
        dim,
        length,
        (length // fused,) * fused if fused > 1 else (),
    )


def _share_rest(block: PlacedBlock) -> Iterator[str]:
    """Plan the modules in a block whose parameters have no sharding rule yet as replicated; yield their names."""
    draft = block.draft
    outside = tuple(map(block.path, block.role.outside))
    for path, module in draft.modules[block.name].named_modules(prefix=block.name):
        own = [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if own and path not in outside and not any(name in draft.rules for name in own):
            _refuse_writers(draft, path, module)
            draft.rules.update(dict.fromkeys(own, _PARTIAL))
            yield path


def _refuse_writers(draft: Draft, path: str, module: Any) -> None:
    """Add a problem if a module in a block may read or write the block's output, and nothing is known about how to
    shard it.

    Such a module cannot be replicated: it would read a partial sum over tensor ranks, or every rank would add its
    output.
    """
    weight = own_parameters(module).get("weight")
    hidden = first_count(text_config(draft.config), ("hidden_size",))
    if weight is None or weight.ndim not in (1, 2) or weight.shape[0] != hidden:
        return
    if draft.wider is not None and draft.wider.get_parameter(f"{path}.weight").shape[0] == hidden:
        return  # the size is not the hidden size: a wider clone has the same number here
    does = "write its block's output, which every rank would add"
    roles = "column or row"
    if weight.ndim == 1:
        does = "read its block's output, which is a partial sum on each tensor rank"
        roles = "shared or outside"
    draft.problem(
        f"tp_size={draft.tp}: {wild_name(path)} may {does}, but the blueprint (how hfscale shards a model's layers) "
        f"does not name it: name it as {roles} in the blueprint, or use tp_size=1"
    )


def _refuse_roleless(block: PlacedBlock) -> None:
    """Add a problem for each parameter of a block for which nothing says whether it is sharded or replicated.

    This applies to blocks whose input is the input of the block's module itself, not of modules inside the block.
    """
    draft = block.draft
    role = block.role
    if role.enter != ("",):
        return
    outside = tuple(f"{block.path(child)}." for child in role.outside)
    for parameter, _ in draft.modules[block.name].named_parameters(prefix=block.name):
        if parameter not in draft.rules and not parameter.startswith(outside):
            draft.roleless.append(parameter)
            draft.problem(
                f"tp_size={draft.tp}: {wild_name(parameter)} is inside a sharded block, but the blueprint (how "
                "hfscale shards a model's layers) does not say how to shard it: name the parameter's module as "
                "column, row or shared in the blueprint, or use tp_size=1"
            )
