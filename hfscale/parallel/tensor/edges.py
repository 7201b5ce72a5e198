"""Install the collectives at the input and output (the *edges*) of tensor-parallel blocks, as hooks on stock modules.

Data flow of one block (``t`` tensor ranks, ``h`` hidden size)::

    [b, s, h] --copy--> column projections --> [b, s, .../t] --> row projection --> partial [b, s, h] --reduce--> full

Between the edges every module is the stock module, with local sizes and plain tensors. The hooks are on the block and
not on its projections, so that wrappers installed on a projection later (adapters, quantized layers, compilers, FSDP)
stay between the edges. hfscale also simulates tensor ranks by threads, to test a sharding that it has derived for an
unknown model. Threads and training processes install the same hooks, with different functions in their :class:`Edge`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.transformers.hidden_states import hidden_states_of, with_hidden_states
from ...distributed.mesh import Mesh
from ...distributed.ops import collectives, overlap
from ...distributed.ops.overlap import (
    DeferredWeightGrad,
    Products,
    Regather,
    as_it_is,
    column_parallel_linear,
    enter_overlapped,
    multiplied_by,
    narrowed,
    set_factors,
)
from ...models.module_kinds import PROJECTIONS, is_transposed
from ...plan.cut import Cut
from ...plan.modules import BlockPlan
from .partial_gradients import PartialSums, as_read
from .random import cut_region

if TYPE_CHECKING:  # imported only with sequence parallelism
    from .sequence.region import SequenceRegion

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Overlap:
    """Overlap communication with computation at the entry of a block: in the backward pass, start the collective on the
    gradient of the block's input, then compute the weight gradients of the block's column projections.
    """

    def __init__(
        self,
        columns: list[nn.Module],
        group: dist.ProcessGroup,
        regather: bool,
    ) -> None:
        self.group = group
        self.regather = regather
        # only exact Linear and Conv1D classes: a subclass may compute something else
        self.columns: list[Any] = [module for module in columns if type(module) in PROJECTIONS]
        self._low_rank: dict[Any, Callable[[Tensor], Tensor]] = {}
        self._factors: list[tuple[Any, Any]] = []  # modules of both factors, per adapter
        self._sums: PartialSums | None = None  # of the factors' gradients
        self._given = False  # whether any adapter was given tokens in the latest pass
        self._waiting: dict[nn.Module, DeferredWeightGrad] = {}
        # gathers the latest input again in the backward pass; ``None`` without ``sequence_regather``
        self.gathered: Regather | None = None
        for module in self.columns:
            self._take_apart(module)

    def enter(self, x: Tensor, stream: "SequenceRegion | None") -> Tensor:
        """Return the block's input for its projections, with all tokens.

        If ``x`` is sharded along the sequence, ``stream`` all-gathers it; otherwise ``stream`` is ``None``.
        """
        self.gathered = None
        if self._waiting or self._given:
            self._forget()
        # torch's compiler overlaps collectives by itself, and cannot trace the state that is kept here.
        if torch.compiler.is_compiling():
            return _entered(x, self.group, stream)
        gather, reduce, entries = (
            (None, self._start_sum, x.numel()) if stream is None else stream.collectives(x)
        )
        autocast = torch.is_autocast_enabled(x.device.type)
        # The gradient is a sum over projections that ran in the autocast dtype, so it is sent in this dtype.
        if autocast:
            reduce = narrowed(reduce, torch.get_autocast_dtype(x.device.type))
        agrees = self._agrees
        if not (agrees or self.regather) and entries * x.element_size() < overlap.OVERLAPPED_FROM:
            if stream is None and not autocast:
                return collectives.copy_to_tp_region(x, self.group)
            return _entered_at_once(x, gather, reduce)
        reads = self._trained_columns(regathers=self.regather and stream is not None)
        weights = [
            (read(column.weight), is_transposed(column), multiplied_by(column)())
            for column, read in reads.items()
        ]
        factors = self._trained_factors()
        self._given = bool(factors)
        x, later = enter_overlapped(x, weights, reduce, gather, self.regather, agrees, factors)
        self._waiting = dict(zip(reads, later, strict=True))
        self.gathered = later[0].regather if later else None
        return x

    def _trained_columns(self, regathers: bool) -> dict[Any, Callable[[Tensor], Tensor]]:
        """Return the projections of the input whose weights train, and how each reads its weight; adapters' factors are
        among them if the input is gathered again for their gradients (``regathers``).
        """
        asked = {**dict.fromkeys(self.columns, as_it_is), **(self._low_rank if regathers else {})}
        return {
            column: read
            for column, read in asked.items()
            if torch.is_grad_enabled() and column.weight.requires_grad
        }

    def _trained_factors(self) -> list[tuple[nn.Module, Any, Any]]:
        if self._sums is None or not self._sums.deferred:
            return []
        return [
            (first, as_read(first, "weight"), as_read(second, "weight"))
            for first, second in self._factors
            if torch.is_grad_enabled()
            and first.weight.requires_grad
            and second.weight.requires_grad
        ]

    def _forget(self) -> None:
        """Forget what is left of a pass that failed, or that did not run every projection or adapter."""
        self._waiting = {}
        self._given = False
        for first, _ in self._factors:
            set_factors(first, None)

    @cached_property
    def _agrees(self) -> bool:
        """Return whether a column projection's matrix product is not torch's own (8-bit products, for example), so that
        it may communicate between ranks.

        If so, all ranks must communicate in the same order whatever their number of tokens, because context ranks may
        have different numbers of tokens. The result is cached: such code is set before the first pass.
        """
        return any(multiplied_by(column) is not Products for column in self.columns)

    def read_by(self, low_rank: Any, read: Callable[[Tensor], Tensor]) -> None:
        """Under ``sequence_regather``, compute the weight gradient of ``low_rank``, the first factor of an adapter,
        from the block's input that is gathered again in the backward pass: the factor then saves no input.

        ``read`` maps the factor's weight to the tensor that the forward pass computes with.
        """
        if type(low_rank) in PROJECTIONS:
            self._low_rank[low_rank] = read
            self._take_apart(low_rank)

    def defer(self, factors: Iterable[tuple[nn.Module, nn.Module]], sums: PartialSums) -> None:
        """Compute the gradients of adapters' factors after starting the backward collective, if adapters take tokens,
        in steps at whose end ``sums`` adds partial gradients.

        ``factors`` are the modules of the first and the second factor of each adapter. In a plain loop each factor's
        gradient is summed in the backward pass. If only some ranks had hooks on adapters, which then take no tokens,
        ranks would make these sums in different orders.
        """
        self._factors.extend(factors)
        self._sums = sums

    def _start_sum(self, grad: Tensor) -> collectives.Started:
        return collectives.start_all_reduce(grad.contiguous(), self.group)

    def _take_apart(self, module: Any) -> None:
        forward = module.forward

        def forward_apart(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            later = self._waiting.pop(module, None) if self._waiting else None
            return (
                forward(x, *args, **kwargs)
                if later is None
                else column_parallel_linear(x, later, module.bias)
            )

        module.forward = forward_apart


def install_block_edges(
    model: nn.Module,
    block: BlockPlan,
    mesh: Mesh,
    stream: "SequenceRegion | None",
    overlap: Overlap | None,
) -> None:
    """Install the hooks of ``block``: collectives at its entry and exit, and random numbers of this rank inside.

    If ``stream`` shards hidden states along the sequence, the entry all-gathers them, and the exit reduce-scatters the
    output.
    """
    group = mesh.tp_group
    rank = mesh.tp_rank
    assert group is not None
    ends = _BlockEnds(group, stream, overlap)
    edge = Edge(
        rank=rank,
        size=mesh.layout.tp,
        enter=ends.enter,
        leave=ends.leave,
        # the other inputs have all tokens, even if hidden states are sharded along the sequence
        enter_other=lambda x: collectives.copy_to_tp_region(x, group),
        gather=lambda x, lengths: collectives.gather_from_tp_region(x, lengths, group),
    )
    hook_block(model, block, edge)
    rows = [model.get_submodule(name) for name in block.row]
    if stream is not None and stream.plan.dropout:
        from .sequence.hooks import draw_sums_alike

        draw_sums_alike(
            stream, block.name, rows, [model.get_submodule(name) for name in block.leave]
        )
    if block.dropout > 0:
        whole = (lambda: not stream.cut) if stream is not None else (lambda: True)
        start = block.enter[0] if block.cut_from is None else block.cut_from
        restore = cut_region(model.get_submodule(start), rows, rank, whole)
        model.register_forward_pre_hook(lambda *_: restore())


def _entered(x: Tensor, group: dist.ProcessGroup, stream: "SequenceRegion | None") -> Tensor:
    return collectives.copy_to_tp_region(x, group) if stream is None else stream.enter(x)


def _entered_at_once(x: Tensor, gather: overlap.Start | None, reduce: overlap.Start) -> Tensor:
    """Return the block's input for its projections. Each collective is waited for right after its start, so it overlaps
    no computation.
    """
    enter = None if gather is None else lambda x: gather(x).result()
    return collectives.apply_mapping(
        x, enter, lambda grad: reduce(grad).result(), overwrites=gather is None
    )


class _BlockEnds:
    """Run the collectives at a block's entry and exit.

    With ``overlap``, the entry's backward collective runs while weight gradients are computed.
    """

    def __init__(
        self, group: dist.ProcessGroup, stream: "SequenceRegion | None", overlap: Overlap | None
    ) -> None:
        self.group = group
        self._stream = stream
        self.overlap = overlap
        self._flat = False  # whether the block's input is ``[b s, h]``
        self._tokens: tuple[int, ...] = ()  # shape of the latest full input, without the hidden dim

    def enter(self, x: Tensor) -> Tensor:
        """Return the block's input with all tokens; in the backward pass, the input's gradient is summed over the
        tensor ranks.
        """
        stream = self._stream if self._stream is not None and self._stream.cut else None
        x = (
            _entered(x, self.group, stream)
            if self.overlap is None
            else self.overlap.enter(x, stream)
        )
        self._flat = x.ndim == 2
        # A compiled graph of an activation checkpoint must not change state outside of the graph.
        if not torch.compiler.is_compiling():
            self._tokens = tuple(x.shape[:-1])
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Sum the block's output over the tensor ranks; if the sequence is sharded, return only this rank's tokens."""
        stream = self._stream
        if stream is None or not stream.cut:
            return collectives.reduce_from_tp_region(x, self.group)
        # A compiled entry has not set _tokens, even if the exit is not compiled.
        compiled = torch.compiler.is_compiling() or not self._tokens
        tokens = (stream.shape_for_compiled() if compiled else None) or self._tokens
        # MoE blocks flatten [b, s, h] to [b s, h]: restore the dims.
        if x.ndim == 2 and len(tokens) == 2 and not self._flat:
            return stream.leave(x.unflatten(0, tokens)).flatten(0, 1)
        return stream.leave(x)


def install_head_edge(
    head: nn.Module, group: dist.ProcessGroup, streams: "Sequence[SequenceRegion]"
) -> None:
    """Install a hook on the entry of the head, the projection onto the vocabulary; the head's output stays sharded."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for stream in streams:
            if (entered := stream.enter_head(args[0])) is not None:
                return entered, *args[1:]
        return collectives.copy_to_tp_region(args[0], group), *args[1:]

    head.register_forward_pre_hook(before)
    for stream in streams:
        stream.feeds_head = True


@dataclass(frozen=True)
class Edge:
    """Hold the rank, and the functions by which a tensor rank communicates at the inputs and outputs of blocks."""

    rank: int
    size: int
    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]
    # applied to the block's inputs other than hidden states, which are the same on all ranks
    enter_other: Callable[[Tensor], Tensor]
    # concatenates the ranks' slices of a tensor's last dim, given their lengths
    gather: Callable[[Tensor, list[int]], Tensor]


def hook_block(model: nn.Module, block: BlockPlan, edge: Edge) -> None:
    """Install hooks that communicate: on the inputs and outputs of ``block``, and on modules inside that mix heads.
    Inputs with a dim of heads are sharded.
    """

    def own_heads(
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Arguments:
        own = dict(kwargs)
        for name, dim in block.heads:
            if own.get(name) is not None:
                own[name] = own[name].chunk(edge.size, dim)[edge.rank]
        for name in block.sample_heads:
            if own.get(name) is not None:
                by_sample = own[name].unflatten(
                    0,
                    (hidden_states_of(args, kwargs).shape[0], -1),
                )
                own[name] = by_sample.chunk(edge.size, 1)[edge.rank].flatten(0, 1)
        return args, own

    def entered(
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Arguments:
        if block.enter_inputs:
            given = {name: kwargs.get(name) for name in block.enter_inputs}
            others = {name: edge.enter_other(x) for name, x in given.items() if x is not None}
            kwargs = {**kwargs, **others}
        return with_hidden_states(args, kwargs, edge.enter(hidden_states_of(args, kwargs)))

    def left(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (
            (edge.leave(output[0]), *output[1:])
            if isinstance(output, tuple)
            else edge.leave(output)
        )

    if block.heads or block.sample_heads:
        model.get_submodule(block.name).register_forward_pre_hook(own_heads, with_kwargs=True)
    for name in block.enter:
        model.get_submodule(name).register_forward_pre_hook(entered, with_kwargs=True)
    for name in block.leave:
        model.get_submodule(name).register_forward_hook(left)
    for name, width in block.across:
        _compute_across(
            model.get_submodule(name),
            width,
            block.replicas if name in block.replicated else 1,
            edge,
        )


def _compute_across(module: nn.Module, width: int, replicas: int, edge: Edge) -> None:
    """Let ``module``, whose input is sharded, compute on its full ``width``: gather the input, and shard the output
    again.

    If ``replicas`` consecutive ranks have the same columns of the input, only those of the first of them are taken.
    """
    cut = Cut("tp", -1, edge.size, replicas=(replicas,))
    lengths = [cut.local_length(width, other) for other in range(edge.size)]

    def gathered(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # The ranks compute different things with the gathered tensor, so its gradient is a sum over the ranks.
        every = edge.gather(args[0], lengths)
        if replicas > 1:
            every = every.unflatten(
                -1,
                (edge.size // replicas, replicas, -1),
            )[..., 0, :].flatten(-2)
        return edge.enter_other(every), *args[1:]

    module.register_forward_pre_hook(gathered)
    module.register_forward_hook(lambda _, args, output: cut.take(output, edge.rank))


def set_local_sizes(module: Any, block: BlockPlan) -> None:
    """Divide the numbers of heads and the widths in the attributes and the config of ``module``, a block, so that they
    fit this rank's shards.
    """
    for path, divisor in block.local_attributes:
        owner, _, name = path.rpartition(".")
        holder = module.get_submodule(owner)
        setattr(holder, name, getattr(holder, name) // divisor)
    if block.local_config:
        module.config = _LocalConfig(module.config, block.local_config)


class _LocalConfig:
    """Wrap a config for one block: some fields have the sizes of this rank, and all others are read from the config."""

    def __init__(
        self,
        config: Any,
        fields: tuple[tuple[str, int], ...],
    ) -> None:
        local = {field: getattr(config, field) // divisor for field, divisor in fields}
        self.__dict__.update(local, _whole=config)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle read such names before any attribute is set.
        if name.startswith("__") or name == "_whole":
            raise AttributeError(name)
        return getattr(self._whole, name)
