"""Run the convolutions and scans of stock mixers (state-space layers, recurrences) segment by segment.

With context parallelism a sequence is divided into pieces, and each rank holds an early and a late piece. A segment is
the part of one document in one piece. The state of a scan is zero at the start of a document. At the start of a later
piece of the document it is the state at the end of the piece before, which a :class:`RankChain` sends between ranks::

    row     [a a a b b b|b b c c c c]        rank 0 has the piece before the bar, rank 1 the piece after it
    scan     a: from a zero state
             b: from a zero state --state--> b: from the state that rank 0 sends;  c: from a zero state
    conv     as if each document had zeros before its first token

The pieces of a sequence, ``0`` to ``2n - 1`` for ``n`` ranks, are scanned in order: first the early piece of every rank
in rank order, then the late pieces in reverse rank order. A rank computes only its own tokens, and waits while other
ranks compute theirs; it sends two states forward and two gradients back. A convolution has no state. It only needs the
last inputs before a piece, so one all-gather collects the ends of all pieces.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import pairwise
from types import MethodType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ..._compat.transformers.recurrences import (
    CONVOLUTION,
    READING,
    SCANS,
    Scan,
    functions_replaced,
    reads_by_functions,
    without_states,
)
from ...errors import ConfigError
from ...plan.sequence_split import Split
from .collectives import apply_mapping, gather_from_sequence_region, tied, waiting

Interval = tuple[int, int]


@dataclass(frozen=True)
class RankChain:
    """Send the states of scans between context ranks that hold consecutive intervals (pieces) of sequences.

    Each rank has two pieces of a sequence: ``index`` 0 is the early piece, 1 the late piece.
    """

    split: Split  # how sequences are divided over the context ranks
    rank: int  # this rank's index among the context ranks
    # first tokens of the documents in the sequence: one tuple per row, or one tuple for all rows
    starts: tuple[tuple[int, ...], ...] | None
    group: dist.ProcessGroup

    def tails(self, x: Tensor, width: int) -> list[Tensor]:
        """Return the ``width`` inputs before each of this rank's two intervals of the sequence, each ``[b, d, width]``.

        ``x [b, d, s]`` has the inputs of this rank's tokens; the last ``width`` inputs of every interval of every rank
        are all-gathered. Inputs of another document than the interval's first token are replaced by zeros.
        """
        split = self.split
        rank = self.rank
        pieces = [split.pieces(each) for each in range(split.size)]
        kept = [[min(width, stop - start) for start, stop in of_rank] for of_rank in pieces]
        here = x.split([stop - start for start, stop in pieces[rank]], -1)
        ends = [
            piece[..., piece.shape[-1] - length :]
            for piece, length in zip(here, kept[rank], strict=True)
        ]
        gathered = gather_from_sequence_region(
            torch.cat(ends, -1),
            [sum(each) for each in kept],
            self.group,
            dim=-1,
        )
        tails = gathered.split([length for of_rank in kept for length in of_rank], -1)
        in_order = [*tails[::2], *reversed(tails[1::2])]
        return [
            self._before(start, in_order[: self._number(index)], x, width)
            for index, (start, _) in enumerate(pieces[rank])
        ]

    def _before(
        self,
        start: int,
        ends: list[Tensor],
        x: Tensor,
        width: int,
    ) -> Tensor:
        there = torch.cat([x[..., :0], *ends], -1)
        there = F.pad(
            there[
                ...,
                max(0, there.shape[-1] - width) :,
            ],
            (max(0, width - there.shape[-1]), 0),
        )
        if self.starts is None:
            return there
        first = [max((place for place in row if place <= start), default=0) for row in self.starts]
        places = torch.arange(start - width, start, device=x.device)
        other = places < torch.tensor(first, device=x.device)[:, None]
        return there.masked_fill(other[:, None], 0.0)

    def receive(self, index: int, state: Tensor, anchor: Tensor) -> Tensor:
        """Return a scan's state before this rank's early (``index`` 0) or late (1) interval of the sequence, received
        from the rank with the preceding interval.

        If this rank has that interval itself, or there is none, return ``state``. A received state requires a gradient
        if ``anchor`` does.
        """
        number = self._number(index)
        if number == 0 or self._owner(number - 1) == self.rank:
            return state
        owner, empty = (
            self._owner(number - 1),
            torch.empty_like(state, memory_format=torch.contiguous_format),
        )

        def backward(grad: Tensor) -> Any:
            _send(grad, owner, self.group)

        return apply_mapping(anchor, lambda _: _receive(empty, owner, self.group), backward)

    def send(self, index: int, state: Tensor) -> Tensor | None:
        """Send a scan's ``state`` after this rank's early (``index`` 0) or late (1) interval of the sequence to the
        rank with the next interval; return ``None`` if that is this rank, or there is no next interval.

        Otherwise return a scalar. The output must be made to depend on the scalar (:func:`.collectives.tied`), so that
        the backward pass receives the gradient of the state.
        """
        number = self._number(index) + 1
        if number == 2 * self.split.size or self._owner(number) == self.rank:
            return None
        owner, like = self._owner(number), torch.empty_like(state, device="meta")

        def forward(state: Tensor) -> Tensor:
            _send(state, owner, self.group)
            return state.new_zeros(())

        def backward(grad: Tensor) -> Tensor:
            return _receive(
                torch.empty(
                    like.shape,
                    dtype=like.dtype,
                    device=grad.device,
                ),
                owner,
                self.group,
            )

        return apply_mapping(state, forward, backward)

    def _number(self, index: int) -> int:
        """Return the position of this rank's early (``index`` 0) or late (1) interval among all intervals of the
        sequence, of which each context rank has two.
        """
        return self.rank if index == 0 else 2 * self.split.size - 1 - self.rank

    def _owner(self, number: int) -> int:
        return min(number, 2 * self.split.size - 1 - number)


def _send(x: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    peer = dist.get_global_rank(group, rank)
    with waiting("send", peer, group):
        dist.send(x.contiguous(), peer, group=group)


def _receive(x: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
    peer = dist.get_global_rank(group, rank)
    with waiting("recv", peer, group):
        dist.recv(x, peer, group=group)
    return x


@dataclass(frozen=True)
class Segments:
    """Describe which intervals of a sequence the tokens ``[b, s, ...]`` of a pass are, and where documents begin."""

    # (start, stop) in the sequence of each piece of this rank, in the order of the tokens
    pieces: tuple[Interval, ...]
    # first tokens of the documents in the sequence: one tuple per row, or one tuple for all rows
    starts: tuple[tuple[int, ...], ...] | None = None
    chain: RankChain | None = None  # ``None`` if this rank has the full sequence as a single piece

    def of_rows(self, index: int) -> Iterator[tuple[slice, list[tuple[int, int, bool]]]]:
        """Yield slices of rows (one row, or all) with their segments in this rank's interval ``index`` of the sequence.

        A segment is (first token, end, whether it continues a document of the preceding interval), in this rank's
        tokens.
        """
        start, stop = self.pieces[index]
        offset = sum(b - a for a, b in self.pieces[:index]) - start
        for row, begins in enumerate(self.starts or ((),)):
            inside = [place for place in begins if start <= place < stop]
            ends = [start, *(place for place in inside if place > start), stop]
            spans = ((a, b) for a, b in pairwise(ends) if a < b)
            pieces = [(a + offset, b + offset, a not in inside) for a, b in spans]
            yield (
                (slice(row, row + 1) if len(self.starts or ()) > 1 else slice(None)),
                pieces,
            )

    def replacement(
        self,
        name: str,
        function: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Return a version of ``function``, a mixer's convolution or scan, that runs separately on each document's
        tokens in each of this rank's intervals of the sequence.
        """
        if name == CONVOLUTION:
            return partial(_convolved, function, self)
        return partial(_scanned, function, SCANS[name], self)


class Replacing(Protocol):
    """Replace the convolutions and scans by which mixers (state-space layers, recurrences) combine tokens, like
    :class:`Segments`.
    """

    def replacement(
        self,
        name: str,
        function: Callable[..., Any],
    ) -> Callable[..., Any]:
        """Return the function that a mixer (a state-space layer, for example) calls in place of its convolution or scan
        ``function`` with this ``name``.
        """


def keep_states_apart(model: nn.Module, segments: Callable[[], Replacing | None]) -> None:
    """Make the supported mixers of a model (state-space layers, recurrences) process each document of a row by itself,
    with states passed between context ranks, as ``segments()`` describes for each pass.

    In a pass for which ``segments()`` returns ``None``, mixers run unchanged.
    """
    for module in filter(reads_by_functions, model.modules()):
        _wrap(module, segments)


def _wrap(module: nn.Module, segments: Callable[[], Replacing | None]) -> None:
    own, kind = module.__dict__.get("forward"), type(module)
    host: Any = (
        kind.forward
        if own is None
        else getattr(own, "__func__", lambda _, *args, **kw: own(*args, **kw))
    )

    @wraps(host)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        known = segments()
        if known is None:
            return host(self, *args, **kwargs)
        args, kwargs = without_states(args, kwargs)
        with functions_replaced(kind, known.replacement):
            return host(self, *args, **kwargs)

    # Not compiled, because the compiler would trace the stock functions. A bound method, so that the method of a deep
    # copy is bound to the copy.
    module.forward = MethodType(torch.compiler.disable(forward), module)  # type: ignore[method-assign]


def _convolved(
    host: Callable[..., Any],
    segments: Segments,
    x: Tensor,
    weight: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Run the convolution ``host`` on each segment of ``x [b, d, s]``, preceded by the inputs before it in its
    document. A segment is the tokens of one document in one of this rank's intervals of the sequence.
    """
    width = weight.shape[-1] - 1
    tails = segments.chain.tails(x, width) if segments.chain is not None and width else []

    def run(
        rows: slice,
        start: int,
        stop: int,
        tail: Tensor | None,
    ) -> tuple[Tensor, None]:
        part = x[rows, :, start:stop]
        if tail is None:
            return host(part, weight, *args, **kwargs), None
        return host(
            torch.cat((tail, part), -1),
            weight,
            *args,
            **kwargs,
        )[..., width:], None

    def before(index: int, _: Tensor | None) -> Tensor | None:
        return tails[index] if tails else None

    return tied(_by_segments(segments, x, -1, run, before, lambda *_: None), tails)


def _scanned(
    host: Callable[..., Any],
    scan: Scan,
    segments: Segments,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the scan ``host`` on each segment, from the state before it. A segment is the tokens of one document in one
    of this rank's intervals of the sequence.

    The state may come from another context rank, for which this rank waits.
    """
    by_place = dict(zip(inspect.signature(host).parameters, args, strict=False))
    given = {**by_place, **kwargs}
    x = given[scan.output]
    dim = scan.tokens[scan.output]
    chain, ties = segments.chain, list[Tensor]()
    wide = torch.promote_types(x.dtype, torch.float32)
    entering = (value for name, value in given.items() if name not in READING)
    anchor = next(
        filter(lambda each: isinstance(each, Tensor) and each.requires_grad, entering), x.detach()
    )

    def run(
        rows: slice, start: int, stop: int, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        part = dict(given)
        for name in scan.tokens.keys() & given.keys():
            if isinstance(given[name], Tensor):
                part[name] = given[name][rows].narrow(scan.tokens[name], start, stop - start)
        named = {
            **part,
            scan.initial: state,
            scan.final: chain is not None and scan.makes is None,
        }
        named.pop("", None)  # a function without an initial state has "" as its argument's name
        result = host(*[named.pop(name) for name in by_place], **named)
        y, after = result if isinstance(result, tuple) else (result, None)
        y, after = _with_state(scan, part, state, y, after, chain is not None)
        return y, None if after is None else after.to(wide)

    def before(index: int, state: Tensor | None) -> Tensor | None:
        if chain is None:
            return None
        zeros = x.new_zeros(scan.shape(given), dtype=wide) if state is None else state
        ties.append(chain.receive(index, zeros, anchor))
        return ties[-1]

    def after(index: int, state: Tensor | None) -> None:
        sent = chain.send(index, state) if chain is not None and state is not None else None
        ties.extend([] if sent is None else [sent])

    output = tied(_by_segments(segments, x, dim, run, before, after), ties)
    return (output, None) if scan.pairs else output


def _with_state(
    scan: Scan,
    given: Mapping[str, Any],
    state: Tensor | None,
    y: Tensor,
    after: Tensor | None,
    final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Add the contribution of the initial ``state`` to a scan's output ``y`` and final state ``after``, if the scan's
    function accepts no initial state.

    If a ``final`` state is needed and the function does not return it, compute it.
    """
    if final and scan.makes is not None:
        after = scan.makes(given)
    if state is not None and scan.adds is not None:
        read, kept = scan.adds(given, state)
        y = y + read.to(y.dtype)
        after = None if after is None else after.to(kept.dtype) + kept
    return y, after


def _by_segments(
    segments: Segments,
    x: Tensor,
    dim: int,
    run: Callable[
        [
            slice,
            int,
            int,
            Tensor | None,
        ],
        tuple[Tensor, Tensor | None],
    ],
    before: Callable[[int, Tensor | None], Tensor | None],
    after: Callable[[int, Tensor | None], None],
) -> Tensor:
    """Call ``run`` for each segment along ``dim``, and return the concatenated outputs. A segment is the tokens of one
    document in one of this rank's intervals of the sequence.

    ``before`` returns the scan's state before an interval, and ``after`` receives the state after it.
    """
    if x.shape[dim] != (length := sum(stop - start for start, stop in segments.pieces)):
        raise ConfigError(
            f"a recurrent layer must get the {length} tokens of this rank, got {x.shape[dim]} tokens: use "
            "sequence_parallel=False"
        )
    state = None
    pieces = list[Tensor]()
    for index in range(len(segments.pieces)):
        state = before(index, state)
        rows = list[Tensor]()
        states = list[Tensor]()
        for row, spans in segments.of_rows(index):
            outputs = list[Tensor]()
            kept = None if state is None else state[row]
            for start, stop, continues in spans:
                y, kept = run(row, start, stop, kept if continues else None)
                outputs.append(y)
            rows += [_cat(outputs, dim)] if outputs else []
            states += [] if kept is None else [kept]
        pieces += [_cat(rows, 0)] if rows else []
        state = _cat(states, 0) if states else None
        after(index, state)
    return _cat(pieces, dim)


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)
