"""The edges of a tensor-parallel block, as hooks on the block.

The hooks sit on the block and not on its projections, so that adapters and quantized layers put around a projection
later stay inside the edges and see plain local tensors.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..._host.transformers.hidden_states import hidden_states_of, with_hidden_states
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
    group, rank = mesh.group("tp"), mesh.ranks["tp"]
    if group is None:
        return
    BlockEdge(block, group, rank, stream, overlap).install(model)
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


class BlockEdge:
    """What becomes of a block's arguments and of its result, where these are the same on all ranks of ``group``.

    Attributes:
        stream: of which each rank has its tokens only, outside the block.
        overlap: what gathers the input again for weight gradients, and sums the input's gradient meanwhile.
    """

    def __init__(
        self,
        block: BlockPlan,
        group: dist.ProcessGroup,
        rank: int,
        stream: SequenceRegion | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self.block, self.group, self.rank, self.stream, self.overlap = block, group, rank, stream, overlap
        self._tokens: tuple[int, ...] = ()  # shape of the latest input, whole, without the hidden dim

    def install(self, model: nn.Module) -> None:
        """Hook the modules of ``model`` at which the block begins and ends."""
        if self.block.heads or self.block.sample_heads:
            model.get_submodule(self.block.name).register_forward_pre_hook(self._take_own_heads, with_kwargs=True)
        for name in self.block.enter:
            model.get_submodule(name).register_forward_pre_hook(self._before, with_kwargs=True)
        for name in self.block.leave:
            model.get_submodule(name).register_forward_hook(self._after)

    def enter(self, x: Tensor) -> Tensor:
        """The block's input, all tokens; its gradient is summed over the ranks."""
        if self.overlap is not None:
            x = self.overlap.enter(x)
        else:
            x = enter(x, self.group) if self._cut_stream is None else self._cut_stream.enter(x)
        self._tokens = tuple(x.shape[:-1])
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The sum over the ranks of what the block computes on each, of the tokens that this rank keeps."""
        stream = self._cut_stream
        if stream is None:
            return leave(x, self.group)
        if x.ndim == 2 and len(self._tokens) == 2:  # a mixture lists all samples' tokens: sample by sample again
            return stream.leave(x.unflatten(0, self._tokens)).flatten(0, 1)
        return stream.leave(x)

    @property
    def _cut_stream(self) -> SequenceRegion | None:
        return self.stream if self.stream is not None and self.stream.cut else None

    def _before(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # Those are whole, also where the stream is cut along the sequence.
        besides = {name: enter(kwargs[name], self.group) for name in self._given(self.block.enter_inputs, kwargs)}
        return with_hidden_states(args, {**kwargs, **besides}, self.enter(hidden_states_of(args, kwargs)))

    def _after(self, _: nn.Module, args: Any, output: Any) -> Any:
        return (self.leave(output[0]), *output[1:]) if isinstance(output, tuple) else self.leave(output)

    def _take_own_heads(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Of arguments that have an entry per head, those of this rank's heads."""
        dims, size = dict(self.block.heads), dist.get_world_size(self.group)
        own = {name: kwargs[name].chunk(size, dims[name])[self.rank] for name in self._given(dims, kwargs)}
        for name in self._given(self.block.sample_heads, kwargs):
            samples = hidden_states_of(args, kwargs).shape[0]
            heads = kwargs[name].unflatten(0, (samples, -1)).chunk(size, 1)[self.rank]
            own[name] = heads.flatten(0, 1)
        return args, {**kwargs, **own}

    @staticmethod
    def _given(names: Iterable[str], kwargs: dict[str, Any]) -> list[str]:
        return [name for name in names if kwargs.get(name) is not None]


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
