"""The edges of a tensor-parallel block, as hooks on the block.

The hooks sit on the block and not on its projections, so that adapters and quantized layers put around a projection
later stay inside the edges and see plain local tensors.
"""

from typing import Any

import torch.distributed as dist
from torch import nn

from ..mesh import Mesh
from ..ops import enter, leave
from ..plan import BlockPlan
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
        return args, {**kwargs, **shares}

    if block.heads:
        model.get_submodule(block.name).register_forward_pre_hook(own_heads, with_kwargs=True)
    for name in block.enter:
        model.get_submodule(name).register_forward_pre_hook(before, with_kwargs=True)
    for name in block.leave:
        model.get_submodule(name).register_forward_hook(after)
    if block.dropout > 0:
        cut_region(model.get_submodule(block.enter[0]), [model.get_submodule(name) for name in block.row], rank)


def install_head_edge(head: nn.Module, group: dist.ProcessGroup) -> None:
    """Hook ``enter`` before the projection onto the vocabulary; its output stays cut."""
    head.register_forward_pre_hook(lambda _, args: (enter(args[0], group), *args[1:]))
