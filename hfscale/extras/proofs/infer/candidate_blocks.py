"""Find the projections of a layer that may form a tensor-parallel block: columns, and the rows that read their results.

A projection of a layer is a *row* candidate if its result reaches the layer's output without another projection in
between, and if its input comes only from projections of the same layer that are not rows; these projections are its
*columns*. If a projection feeds a column (like the down projection of low-rank attention), this earlier projection is
not sharded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from .forward_trace import Call, Trace
from .subject import Subject

Names = tuple[str, ...]


@dataclass(frozen=True)
class CandidateBlock:
    """Describe a possible tensor-parallel block. Paths of its modules are relative to the block; the block's path is
    relative to the layer.
    """

    layer: str  # the first layer that has the block
    path: str  # the smallest module that contains the block; empty if this module is the layer
    column: Names  # projections to shard along their outputs
    row: Names  # projections to shard along their inputs
    uncut: Names  # whole projections that feed the columns
    inner: Names  # modules with parameters between columns and rows; "" is the block
    attends: bool  # whether a token's result depends on other tokens
    optional: bool = False  # whether layers differ in the modules of the block

    @property
    def block(self) -> str:
        """The full name of the block in the first layer that has it."""
        return f"{self.layer}.{self.path}" if self.path else self.layer

    def __str__(self) -> str:
        kind = "attention" if self.attends else "MLP"
        return f"{self.path or 'the layer'} ({kind}: {', '.join(self.column)} -> {', '.join(self.row)})"


def find_candidates(subject: Subject, trace: Trace) -> tuple[list[CandidateBlock], list[str]]:
    """Return the distinct candidate blocks of all layers, and the reasons why other groups of projections were
    rejected.
    """
    candidates: dict[tuple[str, Names], CandidateBlock] = {}
    passed: list[str] = []
    for layer in subject.layer_names:
        calls = {name: call for name, call in trace.calls.items() if name.startswith(f"{layer}.")}
        for columns, rows, uncut in _groups(calls, trace.outputs.get(layer, frozenset())):
            made = _candidate(subject, calls, layer, columns, rows, uncut)
            if isinstance(made, str):
                passed += [made] if made not in passed else []
                continue
            known = candidates.setdefault((made.path, made.row), made)
            if replace(made, layer=known.layer) != known:
                candidates[known.path, known.row] = replace(
                    known,
                    column=tuple(dict.fromkeys(known.column + made.column)),
                    uncut=tuple(dict.fromkeys(known.uncut + made.uncut)),
                    inner=tuple(dict.fromkeys(known.inner + made.inner)),
                    attends=known.attends or made.attends,
                    optional=True,
                )
    return list(candidates.values()), passed


def _groups(
    calls: dict[str, Call], written: frozenset[str]
) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Yield the possible blocks of one layer as ``(columns, rows, uncut)``, lists of projections: rows write the
    layer's output, columns feed rows, and uncut ones feed columns and stay unsharded. Rows that share columns form one
    block.
    """
    rows: list[str] = []
    groups: list[tuple[set[str], list[str]]] = []
    for name, call in calls.items():
        if name not in written or not _is_internal(call, calls, rows):
            continue
        rows.append(name)
        feeds = set(call.feeds)
        members = [name]
        for group in [group for group in groups if group[0] & feeds]:
            groups.remove(group)
            feeds = feeds | group[0]
            members = group[1] + members
        groups.append((feeds, members))
    for feeds, members in groups:
        uncut = set(_before(feeds, calls, rows))
        yield (
            [name for name in calls if name in feeds - uncut],
            members,
            [name for name in calls if name in uncut],
        )


def _is_internal(
    call: Call,
    calls: dict[str, Call],
    rows: list[str],
) -> bool:
    """Return whether all inputs of a projection's ``call`` come from projections of the same layer that are not
    ``rows`` (do not write the layer's output).
    """
    return bool(call.feeds) and all(feed in calls and feed not in rows for feed in call.feeds)


def _before(
    names: Iterable[str],
    calls: dict[str, Call],
    rows: list[str],
) -> Iterator[str]:
    waiting = list(names)
    seen = set()
    while waiting:
        name = waiting.pop()
        if name not in seen and _is_internal(calls[name], calls, rows):
            yield from calls[name].feeds
            waiting += calls[name].feeds
        seen.add(name)


def _candidate(
    subject: Subject,
    calls: dict[str, Call],
    layer: str,
    columns: list[str],
    rows: list[str],
    uncut: list[str],
) -> CandidateBlock | str:
    """Return the :class:`CandidateBlock` with these projections, or the reason why they cannot form a block."""
    what = ", ".join(name.removeprefix(f"{layer}.") for name in rows)
    inner = _inner(calls, columns, rows, uncut)
    outside = [name for name in inner if name != layer and not name.startswith(f"{layer}.")]
    if outside or not columns:
        return f"{what}: what it reads passes {', '.join(outside) or 'no projection'}, which is outside of the layer"
    block = _smallest(inner, [*columns, *rows], uncut)
    around = {owner for name in (*columns, *rows) for owner in _owners(layer, name)}
    if any(isinstance(subject.model.get_submodule(name), nn.ModuleList) for name in around):
        return f"{what}: it is one of a list of modules"

    def relative(names: Iterable[str]) -> Names:
        return tuple(name.removeprefix(block).removeprefix(".") for name in names)

    return CandidateBlock(
        layer=layer,
        path=block.removeprefix(layer).removeprefix("."),
        column=relative(columns),
        row=relative(rows),
        uncut=relative(uncut),
        inner=relative(inner),
        attends=any(
            _mixes_tokens(subject, calls[row], calls[column]) for row in rows for column in columns
        ),
    )


def _inner(
    calls: dict[str, Call],
    columns: list[str],
    rows: list[str],
    uncut: list[str],
) -> list[str]:
    """Return the modules with parameters that are used between column and row projections, or between uncut (unsharded)
    projections and columns.
    """
    fed = [column for column in columns if uncut and calls[column].feeds <= set(uncut)]
    used = {parameter for name in (*rows, *fed) for parameter in calls[name].parameters}
    return list(dict.fromkeys(name.rpartition(".")[0] for name in sorted(used)))


def _smallest(
    inner: list[str],
    cut: list[str],
    uncut: list[str],
) -> str:
    """Return the smallest module that contains all modules of a possible block."""
    split = [
        place.split(".") for place in [name.rpartition(".")[0] for name in (*cut, *uncut)] + inner
    ]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    block = ".".join(common)
    # A module with its own parameters may be the block itself, but a projection is always inside the block.
    if block in inner and not any(name.startswith(f"{block}.") for name in cut):
        block = block.rpartition(".")[0]
    return block


def _owners(outer: str, name: str) -> Iterator[str]:
    """Yield the names of the modules inside ``outer`` that contain the module ``name``, from the innermost on."""
    owner = name.rpartition(".")[0]
    while owner.startswith(f"{outer}."):
        yield owner
        owner = owner.rpartition(".")[0]


def _mixes_tokens(subject: Subject, row: Call, column: Call) -> bool:
    """Return whether the input of a row projection at the last token of the first sample depends on the output of a
    column projection at another token.
    """
    samples, length = subject.inputs["input_ids"].shape
    if row.input.numel() // row.input.shape[-1] != samples * length or row.input.shape[0] == length:
        return True
    last = row.input.reshape(samples * length, -1)[length - 1].sum()
    (gradient,) = torch.autograd.grad(last, column.output, retain_graph=True, allow_unused=True)
    if gradient is None:
        return False
    if gradient.numel() // gradient.shape[-1] != samples * length:
        return True
    return bool(gradient.reshape(samples * length, -1)[: length - 1].any())
