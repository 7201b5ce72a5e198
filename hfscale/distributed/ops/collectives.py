"""Run the collectives of the model axes, plain and differentiable, under Megatron-LM's names.

The differentiable collectives are used at the inputs and outputs of tensor-parallel and sequence-parallel modules
(``f`` and ``g`` in Shoeybi et al. 2019, section 3; ``g`` bar and its counterpart in Korthikanti et al. 2022, section
4.2.2). In this table of two ranks, ``x0`` is the input of rank 0, ``g0`` the gradient of its output (``g`` if it is
equal on both ranks), ``[a]`` a shard, and ``[a b]`` the full tensor::

    function                            forward                         backward
    copy_to_tp_region                   x -> x                          g0 + g1 on every rank
    reduce_from_tp_region               x0, x1 -> x0 + x1               g on every rank
    gather_from_tp_region               [a], [b] -> [a b]               this rank's slice of g
    scatter_to_tp_region                [a b] -> this rank's slice      [ga], [gb] -> [ga gb]
    gather_from_sequence_region         [a], [b] -> [a b]               this rank's slice of g0 + g1
    reduce_scatter_to_sequence_region   x0, x1 -> slice of x0 + x1      [ga], [gb] -> [ga gb]

Slices may differ in length if the number of ranks does not divide the vocabulary or the sequence. If all ranks use a
tensor in the same computation, the tensor's gradient is equal on all ranks. If each rank uses the tensor in a different
computation, each rank has a partial gradient.

An all-gather and a reduce-scatter each move half as much as an all-reduce: every rank sends ``(n - 1) / n`` of the full
tensor. A collective can be *started*, so that the caller computes before it takes the result. While ``torch.compile``
traces, torch's functional collectives are used: any other collective would break the graph. The compiler then decides
when to wait.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from sys import getrefcount
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..._compat.torch import (
    copy_all,
    functional_collectives as functional,
    is_unshared,
)
from ..processes import backend_of

Map = Callable[[Tensor], Tensor]

all_gather_single: Any = dist.all_gather_single
_reduce_scatter: Any = dist.reduce_scatter_single
# From this size on, gloo's all-gather takes longer than an all-to-all of the same bytes: over two ranks 1.1 against 0.9
# ms for 1 MiB, and 0.40 against 0.27 ms for 256 KiB. gloo's all-reduce stays faster: 0.6 against 1.5 ms for 1 MiB.
_LARGE = 64 << 10
_waits: "list[Waiting]" = []
_past: deque[tuple[float, float]] = deque(maxlen=10_000)


class Started:
    """Hold a collective that has been started; :meth:`result` waits until it is done."""

    def __init__(self, work: Any, finish: Callable[[], Tensor]) -> None:
        self._work = work
        self._finish = finish

    def result(self) -> Tensor:
        """Wait for the collective and return its result; call this only once."""
        if self._work is not None:
            self._work.wait()
        return self._finish()


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Started:
    """Start an all-reduce (sum) of ``x``, which must be contiguous; in place unless ``torch.compile`` traces."""
    if torch.compiler.is_compiling():
        total = functional.all_reduce(x, "sum", group)
        return Started(None, lambda: total)
    return Started(dist.all_reduce(x, group=group, async_op=True), lambda: x)


def start_all_gather(
    x: Tensor, lengths: Sequence[int], dim: int, group: dist.ProcessGroup
) -> Started:
    """Start an all-gather of ``x`` along ``dim``, where each rank has ``lengths[rank]`` entries; the result is the full
    tensor, in rank order.
    """
    dim, size = dim % x.ndim, len(lengths)
    even = max(lengths) == min(lengths)
    x = _padded(x, max(lengths), dim).contiguous()
    in_place = even and _leads(x.shape, dim)
    if torch.compiler.is_compiling():
        parts = functional.all_gather_tensor(x, 0, group).chunk(size)
        return Started(
            None,
            lambda: torch.cat(
                [p.narrow(dim, 0, n) for p, n in zip(parts, lengths, strict=True)],
                dim,
            ),
        )
    whole = x.new_empty(
        (*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]) if in_place else (size, *x.shape)
    )
    pieces = whole.view(size * x.shape[0], *x.shape[1:])
    if x.numel() * x.element_size() >= _LARGE and backend_of(group, x.device) == "gloo":
        work = dist.all_to_all_single(
            pieces,
            torch.cat([x] * size),
            group=group,
            async_op=True,
        )
    else:
        work = all_gather_single(pieces, x, group=group, async_op=True)

    def finish() -> Tensor:
        if in_place:
            return whole
        return torch.cat(
            [part.narrow(dim, 0, length) for part, length in zip(whole, lengths, strict=True)],
            dim,
        )

    return Started(work, finish)


def start_reduce_scatter(
    x: Tensor, lengths: Sequence[int], dim: int, group: dist.ProcessGroup
) -> Started:
    """Start a reduce-scatter along ``dim``: the ranks' tensors ``x``, which all have the full length, are summed, and
    each rank gets its ``lengths[rank]`` entries of the sum.
    """
    dim, size, length = dim % x.ndim, len(lengths), lengths[dist.get_rank(group)]
    if max(lengths) == min(lengths) and _leads(x.shape, dim):
        pieces = x.contiguous().view(
            size,
            *x.shape[:dim],
            length,
            *x.shape[dim + 1 :],
        )
    else:
        pieces = torch.stack(
            [_padded(piece, max(lengths), dim) for piece in x.split(list(lengths), dim)]
        )
    if torch.compiler.is_compiling():
        own = functional.reduce_scatter_tensor(pieces.flatten(0, 1), "sum", 0, group)
        return Started(None, lambda: _cropped(own, length, dim))
    if backend_of(group, x.device) != "gloo":
        summed = pieces.new_empty(pieces.shape[1:])
        work = _reduce_scatter(summed, pieces.flatten(0, 1), group=group, async_op=True)
        return Started(work, lambda: _cropped(summed, length, dim))
    # gloo would reduce the full tensor on every rank and drop the rest: 6.2 ms for 4 MiB, against 2.0 ms here.
    parts = torch.empty_like(pieces)
    work = dist.all_to_all_single(parts, pieces, group=group, async_op=True)
    return Started(work, lambda: _cropped(parts.sum(0), length, dim))


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce (sum) ``x`` in place, which must be contiguous; if ``torch.compile`` traces, return a new sum."""
    if torch.compiler.is_compiling():
        return start_all_reduce(x.contiguous(), group).result()
    dist.all_reduce(x, group=group)
    return x


def all_reduce_together(
    pieces: Sequence[Tensor], group: dist.ProcessGroup, divisor: int = 1
) -> None:
    """Sum tensors over the ranks in place, with one all-reduce for all of them, in their widest dtype; divide the sums
    by ``divisor``.
    """
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    dist.all_reduce(flat, group=group)
    if divisor != 1:  # before the sums are rounded to a narrower dtype
        flat.div_(divisor)
    sums = flat.split([piece.numel() for piece in pieces])
    totals = [total.view_as(piece) for piece, total in zip(pieces, sums, strict=True)]
    copy_all(list(pieces), totals)


def all_gather(
    x: Tensor,
    lengths: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """All-gather ``x`` along ``dim``, where each rank has ``lengths[rank]`` entries; return the full tensor, in rank
    order.
    """
    return start_all_gather(x, lengths, dim, group).result()


def reduce_scatter(
    x: Tensor,
    lengths: Sequence[int],
    dim: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Sum the ranks' tensors ``x``, and return this rank's ``lengths[rank]`` entries of the sum along ``dim``."""
    return start_reduce_scatter(x, lengths, dim, group).result()


def own_slice(x: Tensor, lengths: Sequence[int], dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's ``lengths[rank]`` entries of ``x`` along ``dim``, as a view."""
    rank = dist.get_rank(group)
    return x.narrow(dim, sum(lengths[:rank]), lengths[rank])


def all_to_all(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Exchange rows between ranks: send ``send[r]`` rows of ``x [sum(send), ...]`` to each rank ``r``, in rank order.

    Return the received rows ``[sum(receive), ...]``, those of rank 0 first. Without a group, return ``x``.
    """
    if group is None:
        return x
    received = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(
        received,
        x.contiguous(),
        list(receive),
        list(send),
        group=group,
    )
    return received


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Map | None,
        backward: Any,
        undefined: bool,
        overwrites: bool,
    ) -> Tensor:
        ctx.of_gradient = backward
        ctx.overwrites = overwrites and not torch.compiler.is_compiling()
        ctx.set_materialize_grads(not undefined)
        return x.view_as(x) if forward is None else forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        # Autograd may pass the same gradient tensor to another branch. A variable here would count as a holder.
        if ctx.overwrites and grads[0] is not None:
            own = is_unshared(grads[0], getrefcount(grads[0])) and grads[0].is_contiguous()
            grads = grads if own else (_copied(grads[0]),)
        of_gradient = ctx.of_gradient
        found = grads[0] if of_gradient is None else of_gradient(grads[0])
        return found, None, None, None, None


def apply_mapping(
    x: Tensor,
    forward: Map | None,
    backward: Callable[[Any], Tensor | None] | None,
    undefined: bool = False,
    overwrites: bool = False,
) -> Tensor:
    """Return ``forward(x)``, a new tensor or a view, with ``backward`` as the function of its gradient; save no tensor.

    Either function may be ``None``, which stands for the identity. With ``undefined``, ``backward`` receives ``None``
    for a missing gradient; otherwise it receives zeros. With ``overwrites``, ``backward`` may write into the gradient,
    and receives a contiguous copy of a gradient that anything else holds, or that is not contiguous.
    """
    return _Mapping.apply(x, forward, backward, undefined, overwrites)


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0], *[None] * ctx.others)


def tied(y: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return ``y``; its backward pass also runs the backward passes of ``others``, whose gradients may be missing.

    This is needed if these backward passes communicate: other ranks wait for them, even if this rank did not use
    ``others``.
    """
    waited_for = [each for each in others if each.requires_grad]
    return _Tied.apply(y, *waited_for) if waited_for else y


def copy_to_tp_region(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return ``x``, an activation or parameter that is equal on all ranks of ``group``; in the backward pass,
    all-reduce its gradient.
    """
    if group is None:
        return x
    return apply_mapping(x, None, partial(all_reduce, group=group), overwrites=True)


def reduce_from_tp_region(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce the partial sums ``x``, of any shape, over the ranks of ``group``; pass the gradient on unchanged.

    The sum is computed in the memory of ``x`` if autograd computed ``x`` for this call alone, otherwise in a copy.
    """
    return x if group is None else apply_mapping(x, partial(_summed, group=group), None)


def gather_from_tp_region(
    x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup | None, dim: int = -1
) -> Tensor:
    """All-gather ``x`` over ``group`` along ``dim``, where each rank has ``lengths[rank]`` entries; in the backward
    pass, return this rank's slice of the gradient.
    """
    if group is None:
        return x
    return apply_mapping(
        x, _on(all_gather, lengths, dim, group), _on(own_slice, lengths, dim, group)
    )


def scatter_to_tp_region(
    x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, dim: int
) -> Tensor:
    """Return a copy of this rank's ``lengths[rank]`` entries along ``dim`` of ``x``, which is equal on all ranks.

    The gradient is all-gathered.
    """
    own = _on(own_slice, lengths, dim, group)
    # A copy even if the slice is contiguous (one sample), so that the full tensor can be freed.
    return apply_mapping(
        x,
        lambda x: own(x).clone(memory_format=torch.contiguous_format),
        _on(all_gather, lengths, dim, group),
    )


def gather_from_sequence_region(
    x: Tensor,
    lengths: Sequence[int],
    group: dist.ProcessGroup,
    dim: int,
    known: Tensor | None = None,
) -> Tensor:
    """All-gather ``x`` along ``dim``, where each rank has ``lengths[rank]`` entries; reduce-scatter its gradient.

    ``known`` is the full tensor, if it exists already: it is returned without an all-gather.
    """
    back = _on(reduce_scatter, lengths, dim, group)
    if known is None:
        return apply_mapping(x, _on(all_gather, lengths, dim, group), back)
    whole = known.detach()
    return apply_mapping(x, lambda _: whole.view_as(whole), back)


def reduce_scatter_to_sequence_region(
    x: Tensor, lengths: Sequence[int], group: dist.ProcessGroup, dim: int
) -> Tensor:
    """Sum the ranks' tensors ``x``, and return this rank's ``lengths[rank]`` entries of the sum along ``dim``; the
    gradient is all-gathered.
    """
    return apply_mapping(
        x, _on(reduce_scatter, lengths, dim, group), _on(all_gather, lengths, dim, group)
    )


def _on(
    collective: Callable[..., Tensor], lengths: Sequence[int], dim: int, group: dist.ProcessGroup
) -> Map:
    return partial(collective, lengths=lengths, dim=dim, group=group)


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if torch.compiler.is_compiling():  # not in place
        return all_reduce(x, group)
    own = x.is_contiguous() and is_unshared(x)
    return all_reduce(x.detach() if own else _copied(x), group)


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Return whether all dims before ``dim`` have size 1 (as in a batch of one sequence), so that shards can be
    concatenated along ``dim`` in memory without a copy.
    """
    return all(size == 1 for size in shape[:dim])


def _cropped(x: Tensor, length: int, dim: int) -> Tensor:
    # A copy, because stock code may change the result in place, which a view of this kind does not allow.
    return x if x.shape[dim] == length else x.narrow(dim, 0, length).clone()


def _padded(x: Tensor, length: int, dim: int) -> Tensor:
    missing = length - x.shape[dim]
    return (
        F.pad(
            x,
            (0, 0) * (x.ndim - 1 - dim) + (0, missing),
        )
        if missing
        else x
    )


@dataclass(eq=False)
class Waiting:
    """Describe a send or receive that a thread is waiting for."""

    call: str  # ``"send"`` or ``"recv"``
    peer: int  # the other rank, as a global rank
    group: dist.ProcessGroup | None
    since: float = field(default_factory=time.monotonic)


@contextmanager
def waiting(call: str, peer: int, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Record in :func:`waits`, for the duration of the ``with`` block, that this process waits for the rank ``peer`` to
    send or receive.
    """
    one = Waiting(call, peer, group)
    _waits.append(one)
    try:
        yield
    finally:
        _waits.remove(one)
        _past.append((time.time() - (time.monotonic() - one.since), time.time()))


def waits() -> list[Waiting]:
    """Return the sends and receives for which this process is waiting now, the oldest first."""
    return list(_waits)


def past_waits() -> list[tuple[float, float]]:
    """Return (start, end), in seconds since 1970, of the latest sends and receives for which this process has
    waited.
    """
    return list(_past)
