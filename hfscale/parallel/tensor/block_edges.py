"""Install the edges of a tensor-parallel block as hooks on the block.

The hooks sit on the block and not on its projections, so that adapters and quantized layers put around a projection
later stay inside the edges and see plain local tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...distributed.mesh import Mesh
from ...distributed.ops import enter, gather, leave
from ...plan import BlockPlan
from .deferred_weights import Overlap
from .edges import Edge, hook_block
from .random import cut_region
from .sequence_hooks import draw_sums_alike
from .sequence_region import SequenceRegion


def install_block_edges(
    model: nn.Module, block: BlockPlan, mesh: Mesh, stream: SequenceRegion | None = None, overlap: Overlap | None = None
) -> None:
    """Install hooks on the entry and the exit of ``block``; between them, draw random numbers specific to this rank.

    Where the ``stream`` is cut along the sequence, entering gathers it and leaving scatters it.
    """
    group, rank = mesh.tp_group, mesh.tp_rank
    if group is None:
        return
    ends = _BlockEnds(group, stream, overlap)
    edge = Edge(
        rank=rank,
        size=mesh.layout.tp,
        enter=ends.enter,
        leave=ends.leave,
        enter_other=lambda x: enter(x, group),  # also where the stream is cut along the sequence
        gather=lambda x, lengths: gather(x, lengths, group),
    )
    hook_block(model, block, edge)
    rows = [model.get_submodule(name) for name in block.row]
    if stream is not None and stream.plan.dropout:
        draw_sums_alike(stream, block.name, rows, [model.get_submodule(name) for name in block.leave])
    if block.dropout > 0:
        whole = (lambda: not stream.cut) if stream is not None else (lambda: True)
        start = block.enter[0] if block.cut_from is None else block.cut_from
        restore = cut_region(model.get_submodule(start), rows, rank, whole)
        model.register_forward_pre_hook(lambda *_: restore())


class _BlockEnds:
    """The collectives at the entry and exit of a block.

    Args:
        stream: the region of sequence parallelism around the block, where each rank has only its tokens.
        overlap: replaces the entry's collectives by ones that overlap with weight gradients.
    """

    def __init__(self, group: dist.ProcessGroup, stream: SequenceRegion | None, overlap: Overlap | None) -> None:
        self.group, self.stream, self.overlap = group, stream, overlap
        self._tokens: tuple[int, ...] = ()  # shape of the latest full input, without the hidden dim

    def enter(self, x: Tensor) -> Tensor:
        """Return the block's input with all tokens; its gradient is summed over the tensor ranks."""
        if self.overlap is not None:
            x = self.overlap.enter(x)
        else:
            x = enter(x, self.group) if self._cut_stream is None else self._cut_stream.enter(x)
        self._tokens = tuple(x.shape[:-1])
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Sum the block's output over the tensor ranks, and keep this rank's tokens where the sequence is cut."""
        stream = self._cut_stream
        if stream is None:
            return leave(x, self.group)
        if x.ndim == 2 and len(self._tokens) == 2:  # MoE blocks flatten [b, s, h] to [b s, h]: undo it
            return stream.leave(x.unflatten(0, self._tokens)).flatten(0, 1)
        return stream.leave(x)

    @property
    def _cut_stream(self) -> SequenceRegion | None:
        return self.stream if self.stream is not None and self.stream.cut else None


def install_head_edge(head: nn.Module, group: dist.ProcessGroup, streams: Sequence[SequenceRegion] = ()) -> None:
    """Install hooks on the entry of the projection onto the vocabulary; its output stays sharded."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        from_stream = (stream.enter_head(args[0]) for stream in streams)
        entered = next((x for x in from_stream if x is not None), None)
        return (enter(args[0], group) if entered is None else entered, *args[1:])

    head.register_forward_pre_hook(before)
    for stream in streams:
        stream.feeds_head = True
