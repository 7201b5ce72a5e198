"""The edges of a tensor-parallel block, as hooks on the block.

The hooks sit on the block and not on its projections, so that adapters and quantized layers put around a projection
later stay inside the edges and see plain local tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...mesh import Mesh
from ...ops import enter, gather, leave
from ...plan import BlockPlan
from ...plan.cut import Cut
from .deferred_weights import Overlap
from .random import cut_region
from .sequence import SequenceRegion


def install_block_edges(
    model: nn.Module, block: BlockPlan, mesh: Mesh, stream: SequenceRegion | None = None, overlap: Overlap | None = None
) -> None:
    """Hook the entry and the exit of ``block``; between them, draw random numbers of this rank's own.

    Where the ``stream`` is cut along the sequence, entering gathers it and leaving scatters it.
    """
    group, rank, size = mesh.group("tp"), mesh.ranks["tp"], mesh.layout.size("tp")
    if group is None:
        return

    shape: list[tuple[int, ...]] = [()]  # of the input, all tokens, without the hidden dim

    def entered(x: Tensor) -> Tensor:
        x = summed_on_the_way_back(x)
        shape[0] = tuple(x.shape[:-1])
        return x

    def summed_on_the_way_back(x: Tensor) -> Tensor:
        if overlap is not None:
            return overlap.enter(x)
        return stream.enter(x) if stream is not None and stream.cut else enter(x, group)

    def left(x: Tensor) -> Tensor:
        if stream is None or not stream.cut:
            return leave(x, group)
        if x.ndim == 2 and len(shape[0]) == 2:  # a mixture lists the tokens of all samples: sample by sample again
            return stream.leave(x.unflatten(0, shape[0])).flatten(0, 1)
        return stream.leave(x)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Those are whole, also where the stream is cut along the sequence.
        besides = {name: enter(kwargs[name], group) for name in block.enter_inputs if kwargs.get(name) is not None}
        kwargs = {**kwargs, **besides}
        if args:
            return (entered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": entered(kwargs["hidden_states"])}

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (left(output[0]), *output[1:]) if isinstance(output, tuple) else left(output)

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
        _compute_across(model.get_submodule(name), width, block.copies if name in block.copied else 1, group, rank)
    rows = [model.get_submodule(name) for name in block.row]
    if stream is not None and stream.plan.dropout:
        stream.draw_sums_alike(block.name, rows, [model.get_submodule(name) for name in block.leave])
    if block.dropout > 0:
        whole = (lambda: not stream.cut) if stream is not None else (lambda: True)
        start = block.enter[0] if block.cut_from is None else block.cut_from
        restore = cut_region(model.get_submodule(start), rows, rank, whole)
        model.register_forward_pre_hook(lambda *_: restore())


def _compute_across(module: nn.Module, width: int, copies: int, group: dist.ProcessGroup, rank: int) -> None:
    """Let ``module`` read the whole ``width`` of a cut activation, and keep this rank's share of what it returns.

    Where ``copies`` consecutive ranks hold the same share, the first one's is read.
    """
    size = dist.get_world_size(group)
    whole = Cut("tp", -1, size, copies=(copies,))
    lengths = [whole.local_length(width, other) for other in range(size)]

    def gathered(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # What follows differs between ranks, so the gradient of the whole is the sum over them.
        every = gather(args[0], lengths, group)
        firsts = every.unflatten(-1, (size // copies, copies, -1))[..., 0, :].flatten(-2) if copies > 1 else every
        return enter(firsts, group), *args[1:]

    module.register_forward_pre_hook(gathered)
    module.register_forward_hook(lambda _, args, output: whole.take(output, rank))


def install_head_edge(head: nn.Module, group: dist.ProcessGroup, streams: Sequence[SequenceRegion] = ()) -> None:
    """Hook the entry of the projection onto the vocabulary; its output stays cut."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        from_stream = (stream.enter_head(args[0]) for stream in streams)
        entered = next((x for x in from_stream if x is not None), None)
        return (enter(args[0], group) if entered is None else entered, *args[1:])

    head.register_forward_pre_hook(before)
    for stream in streams:
        stream.feeds_head = True
