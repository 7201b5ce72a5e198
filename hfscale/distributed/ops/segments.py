"""Run the convolutions and scans of stock mixers segment by segment, with a state from one to the next.

A segment is what one document has of one piece of a sequence. States begin as zeros where a document does, and go on
from piece to piece, which a :class:`Chain` carries between ranks that each have some of the pieces::

    row     [a a a b b b|b b c c c c]        rank 0 has the piece before the bar, rank 1 the other
    scan     a: from 0                       y of [b b]: from the state that rank 0 sends
             b: from 0, state --------------> c: from 0
    conv     as if each document had zeros before its first token
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..._compat.transformers.recurrences import (
    CONVOLUTION,
    SCANS,
    Scan,
    functions_replaced,
    reads_by_functions,
    without_states,
)
from ...errors import ConfigError

Interval = tuple[int, int]


class Chain(Protocol):
    """Carry states between the pieces of sequences, in their order."""

    def tails(self, x: Tensor, width: int) -> list[Tensor]:
        """Return, for each piece here, the ``width`` inputs before it ``[b, d, width]``, of its document; else 0."""

    def receive(self, index: int, state: Tensor, anchor: Tensor) -> Tensor:
        """Return the state before the piece here at ``index``, given zeros, or the state after the previous piece here.
        It has a gradient if ``anchor`` has.
        """

    def send(self, index: int, state: Tensor) -> Tensor | None:
        """Give the state after the piece here at ``index`` to the next piece. If that is on another rank, return what
        the output has to depend on (:func:`tied`) for the state's gradient to come back.
        """


@dataclass(frozen=True)
class Segments:
    """Say where the tokens of a pass, ``[b, s, ...]``, are in their sequences, and where documents begin."""

    pieces: tuple[Interval, ...]  # of the sequence: the tokens here, one piece after the other
    # for each row, or once for all alike, the places in the sequence where a document begins; ``None``: nowhere
    starts: tuple[tuple[int, ...], ...] | None = None
    chain: Chain | None = None  # ``None``: all pieces are here

    @property
    def filled(self) -> list[int]:
        """The indices of the pieces with tokens."""
        return [index for index, (start, stop) in enumerate(self.pieces) if start < stop]

    @property
    def length(self) -> int:
        """The number of tokens here."""
        return sum(stop - start for start, stop in self.pieces)

    def of_rows(self, index: int) -> Iterator[tuple[slice, list[tuple[int, int, bool]]]]:
        """Yield, for each row or all rows together, the segments of the piece at ``index``: first token, end (both
        counted here), and whether it goes on from the piece before.
        """
        start, stop = self.pieces[index]
        offset = sum(b - a for a, b in self.pieces[:index]) - start
        for row, begins in enumerate(self.starts or ((),)):
            inside = [place for place in begins if start <= place < stop]
            ends = [start, *(place for place in inside if place > start), stop]
            spans = ((a, b) for a, b in pairwise(ends) if a < b)
            found = [(a + offset, b + offset, a not in inside) for a, b in spans]
            yield (slice(row, row + 1) if len(self.starts or ()) > 1 else slice(None)), found


def starts_of(documents: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return :attr:`Segments.starts` of the documents ``[b, s]``, counted in each row; waits for their device."""
    rows: list[list[int]] = [[] for _ in documents]
    for row, place in documents.diff(dim=-1).nonzero().tolist():
        rows[row].append(place + 1)
    found = tuple(map(tuple, rows))
    return found[:1] if len(set(found)) == 1 else found


def keep_states_apart(model: nn.Module, segments: Callable[[], Segments | None]) -> None:
    """Let the mixers in a model that are known compute the :class:`Segments` of each pass; ``None``: as they are."""
    for module in model.modules():
        if reads_by_functions(module):
            _wrap(module, segments)


def _wrap(module: nn.Module, segments: Callable[[], Segments | None]) -> None:
    host: Any = module.__dict__.get("forward", type(module).forward)

    @wraps(host)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        of_pass = segments()
        before = () if isinstance(host, MethodType) else (self,)
        if of_pass is None:
            return host(*before, *args, **kwargs)
        args, kwargs = without_states(args, kwargs)
        with functions_replaced(self, lambda name, function: _replacement(name, function, of_pass)):
            return host(*before, *args, **kwargs)

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]  # which a deep copy binds to the copy


def _replacement(name: str, function: Callable[..., Any], segments: Segments) -> Callable[..., Any]:
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if name == CONVOLUTION:
            return _convolved(function, segments, *args, **kwargs)
        return _scanned(_Call(function, SCANS[name], args, kwargs), segments)

    return replaced


def _check(tokens: int, segments: Segments) -> None:
    if tokens != segments.length:
        raise ConfigError(
            f"a recurrence is given {tokens} tokens of {segments.length} that are in this pass: use "
            "sequence_parallel=False, and no cache (use_cache=False)"
        )


def _convolved(
    host: Callable[..., Any], segments: Segments, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Convolve each segment of ``x [b, d, s]`` with what is before it in its document."""
    _check(x.shape[-1], segments)
    width = weight.shape[-1] - 1
    tails = segments.chain.tails(x, width) if segments.chain is not None and width else None

    def convolved(index: int, rows: slice, start: int, stop: int, continues: bool) -> Tensor:
        part = x[rows, :, start:stop]
        if tails is None or not continues:
            found: Tensor = host(part, weight, *args, **kwargs)
            return found
        found = host(torch.cat((tails[index][rows], part), -1), weight, *args, **kwargs)
        return found[..., width:]

    pieces = [
        [_cat([convolved(index, rows, *span) for span in spans], -1) for rows, spans in segments.of_rows(index)]
        for index in segments.filled
    ]
    return tied(_cat([_cat(rows, 0) for rows in pieces], -1), tails or ())


class _Call:
    """A call of a scan by a mixer, of which segments are computed."""

    def __init__(self, host: Callable[..., Any], scan: Scan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.scan, self._host, self._kwargs = scan, host, dict(kwargs)
        self._args = dict(zip(inspect.signature(host).parameters, args, strict=False))
        self.given = {**self._args, **kwargs}
        self.tensors = [each for each in self.given.values() if isinstance(each, Tensor)]

    def zeros(self) -> Tensor:
        """Return the state with which a sequence begins."""
        like = self.given[next(iter(self.scan.tokens))]
        wide = torch.promote_types(like.dtype, torch.float32)
        return torch.zeros(self.scan.shape(self.given), dtype=wide, device=like.device)

    def of(self, rows: slice, start: int, stop: int, state: Tensor | None, final: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output of a segment, and its ``final`` state if asked for; ``state`` is that before it."""
        args, kwargs = (
            {name: self._part(name, value, rows, start, stop) for name, value in given.items()}
            for given in (self._args, self._kwargs)
        )
        if self.scan.initial:
            kwargs[self.scan.initial] = state
        result = self._host(*args.values(), **{**kwargs, self.scan.final: final})
        y, after = result if isinstance(result, tuple) else (result, None)
        if state is not None and self.scan.adds is not None:
            more, kept = self.scan.adds({**args, **kwargs}, state)
            y, after = y + more.to(y.dtype), None if after is None else after.to(kept.dtype) + kept
        return y, None if after is None else after.to(self.zeros().dtype)

    def _part(self, name: str, value: Any, rows: slice, start: int, stop: int) -> Any:
        if name not in self.scan.tokens or not isinstance(value, Tensor):
            return value
        return value[rows].narrow(self.scan.tokens[name], start, stop - start)


def _scanned(call: _Call, segments: Segments) -> Any:
    """Scan each segment from the state before it; a chain's other pieces wait for this one."""
    dim, chain = next(iter(call.scan.tokens.values())), segments.chain
    _check(call.given[next(iter(call.scan.tokens))].shape[dim], segments)
    anchor = next((each for each in call.tensors if each.requires_grad), call.tensors[0])
    state, ties, pieces = call.zeros() if chain is not None else None, list[Tensor](), list[Tensor]()
    for index in range(len(segments.pieces)):
        if chain is not None and state is not None:
            state = chain.receive(index, state, anchor)
            ties.append(state)
        rows, states = list[Tensor](), list[Tensor]()
        for row, spans in segments.of_rows(index):
            found, after = list[Tensor](), None if state is None else state[row]
            for start, stop, continues in spans:
                y, after = call.of(row, start, stop, after if continues else None, chain is not None)
                found.append(y)
            rows += [_cat(found, dim)] if found else []
            states += [after] if after is not None else []
        pieces += [_cat(rows, 0)] if rows else []
        if chain is not None:
            state = _cat(states, 0)
            sent = chain.send(index, state)
            ties += [sent] if sent is not None else []
    output = tied(_cat(pieces, dim), ties)
    return (output, None) if call.scan.pairs else output


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0], *[None] * ctx.others)


def tied(y: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return ``y`` so that its backward pass runs that of ``others``, too: what a rank exchanged and did not use has no
    gradient, but others wait for it.
    """
    waited_for = [each for each in others if each.requires_grad]
    if not waited_for:
        return y
    found: Tensor = _Tied.apply(y, *waited_for)
    return found
