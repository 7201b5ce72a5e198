"""The edges of a tensor-parallel block, as hooks on the block.

The hooks sit on the block and not on its projections, so that adapters and quantized layers put around a projection
later stay inside the edges and see plain local tensors.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..mesh import Mesh
from ..ops import enter, gather_last_dim, leave
from ..plan import BlockPlan
from ..plan.cut import Cut
from .random import cut_region


def install_block_edges(model: nn.Module, block: BlockPlan, mesh: Mesh) -> None:
    """Hook ``enter`` before and ``leave`` after ``block``; between them, draw random numbers of this rank's own."""
    group, rank, size = mesh.group("tp"), mesh.ranks["tp"], mesh.layout.size("tp")
    if group is None:
        return

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (enter(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group)}

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (leave(output[0], group), *output[1:]) if isinstance(output, tuple) else leave(output, group)

    def own_heads(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        shares = {
            name: kwargs[name].chunk(size, dim)[rank] for name, dim in block.heads if kwargs.get(name) is not None
        }
        samples = (args[0] if args else kwargs["hidden_states"]).shape[0]
        for name in block.sample_heads:
            if kwargs.get(name) is not None:
                shares[name] = kwargs[name].unflatten(0, (samples, -1)).chunk(size, 1)[rank].flatten(0, 1)
        return args, {**kwargs, **shares}

    if block.heads or block.sample_heads:
        model.get_submodule(block.name).register_forward_pre_hook(own_heads, with_kwargs=True)
    for name in block.enter:
        model.get_submodule(name).register_forward_pre_hook(before, with_kwargs=True)
    for name in block.leave:
        model.get_submodule(name).register_forward_hook(after)
    for name, width in block.across:
        _compute_across(model.get_submodule(name), width, group, rank)
    if block.dropout > 0:
        cut_region(model.get_submodule(block.enter[0]), [model.get_submodule(name) for name in block.row], rank)


def _compute_across(module: nn.Module, width: int, group: dist.ProcessGroup, rank: int) -> None:
    """Let ``module`` read the whole ``width`` of a cut activation, and keep this rank's share of what it returns."""
    size = dist.get_world_size(group)
    whole = Cut("tp", -1, size)
    lengths = [whole.local_length(width, other) for other in range(size)]

    def gathered(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # What follows differs between ranks, so the gradient of the whole is the sum over them.
        return enter(gather_last_dim(args[0], lengths, group), group), *args[1:]

    module.register_forward_pre_hook(gathered)
    module.register_forward_hook(lambda _, args, output: whole.take(output, rank))


def install_head_edge(head: nn.Module, group: dist.ProcessGroup) -> None:
    """Hook ``enter`` before the projection onto the vocabulary; its output stays cut."""
    head.register_forward_pre_hook(lambda _, args: (enter(args[0], group), *args[1:]))
