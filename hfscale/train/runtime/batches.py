"""Check the microbatches of a step, compare them between the ranks that must get the same batch, and copy them to the
device.

Batches usually come from a loader on the CPU and are checked on the CPU before they are copied, so the CPU never waits
for a device. Batches that are already on the device are read back by one copy, whatever their number. The results of a
step's checks, and the numbers that ranks exchange by gloo, are packed into one tensor, which the CPU reads at once::

    of each microbatch: [valid labels, ids out of the vocabulary, packed, numbered, hash]
    of each rank:       [batch refused, number of microbatches, hash of shapes, hash of contents, executor's numbers]
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch_device import is_accelerator
from ..._compat.transformers.packed_rows import holds_documents, packing, told_apart_by
from ...errors import ConfigError
from ...plan.feature_plans import ROUTES
from ..packed_rows.facts import LENGTHS, numbers_documents
from .writing import sum_or_raise

_MODULUS = 1 << 64
_tell_once = lru_cache(logging.getLogger(__name__).warning)
Look = Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]
"""A function that counts, for one microbatch, its valid labels, and its labels outside of the vocabulary."""

_PLAIN = {
    "input_ids",
    "labels",
    "shift_labels",
    "attention_mask",
    "position_ids",
    "use_cache",
    "num_items_in_batch",
}
_PLAIN |= {*LENGTHS, ROUTES}
_SEPARATE_DOCUMENTS = {"attention_mask", "position_ids"}  # arguments that may do so within a row
in_prepared_pass: ContextVar[bool] = ContextVar("prepared_pass", default=False)
"""Tells whether a step of hfscale calls the model for a microbatch, and not a user's own loop."""


class Counts(NamedTuple):
    """Hold the numbers that are computed from one microbatch on its device and then read by the CPU."""

    valid: int = 0
    outside: int = 0  # number of labels and ids outside of the vocabulary
    packed: int = 0
    # whether a mask [rows, tokens] has numbers other than 0 and 1, and no position_ids
    numbered: int = 0
    hash: int = 0


class _Shared(NamedTuple):
    """Hold what a rank says about its batch of a step; the ranks that must get the same batch compare these values."""

    refused: int
    microbatches: int
    shapes: int
    contents: int


class Microbatch(dict[str, Any]):
    """Hold the keyword arguments of one forward pass, and attributes that were computed from them, such as the number
    of valid labels.
    """

    valid: int | None = None  # number of valid labels; ``None``: not known
    holds_several: bool = False  # whether its rows hold several documents
    by_positions: bool = False  # whether positions begin anew within its rows
    # Whether labels are already shifted, so that the label at each position is the target of that position.
    shifted: bool = False
    # tokens per sample in this rank's hidden states if the sequence is sharded; ``None``: all tokens
    tokens: int | None = None
    parts: int = 1  # number of microbatches into which the given batch is split

    @contextmanager
    def kept_apart(self) -> Iterator[None]:
        """Make transformers' masks keep the documents of packed rows apart inside the ``with`` block, which runs one
        forward pass on this microbatch.
        """
        # Models may derive other positions from inputs other than text.
        known = self.by_positions or self.keys() <= _PLAIN or self.shifted
        token = in_prepared_pass.set(True)
        try:
            with packing(self.by_positions if known else None, self):
                yield
        finally:
            in_prepared_pass.reset(token)

    def learn(self, counts: Counts) -> None:
        """Set the attributes of this microbatch from the numbers in ``counts``: valid labels, and whether rows are
        packed.
        """
        self.valid = counts.valid
        self.holds_several = bool(counts.packed)
        self.by_positions = self.holds_several and told_apart_by(self) == "positions"

    def like(self, values: Mapping[str, Any]) -> "Microbatch":
        """Return a microbatch with the arguments ``values`` and the attributes of this microbatch."""
        other = Microbatch(values)
        vars(other).update(vars(self))
        return other


def look_at(
    batches: Sequence[Mapping[str, Any]],
    look: Look,
    hashed: bool,
    tokens: int | None = None,
) -> Tensor:
    """Compute the numbers of :class:`Counts` for each microbatch, as a tensor ``[microbatches, 5]`` on the device of
    the batches, without waiting for the device.

    Args:
        batches: the microbatches.
        look: returns the number of valid labels, and of labels outside of the vocabulary.
        hashed: also hash the contents, to compare them with other ranks.
        tokens: the size of the vocabulary, to count input ids outside of it; a sharded embedding would accept them.
    """
    rows = []
    for batch in batches:
        valid, outside = look(batch)
        zero = torch.zeros_like(valid)
        ids = batch.get("input_ids")
        if tokens is not None and ids is not None:
            strange = (ids.clamp(0, tokens - 1) != ids).sum()
            outside = outside + (
                strange if strange.device == outside.device else strange.to(outside.device)
            )
        packed = zero
        numbered = zero
        if not batch.keys().isdisjoint(_SEPARATE_DOCUMENTS):
            documents = holds_documents(batch)
            packed = zero if documents is None else documents.to(zero.device, zero.dtype)
            numbered = numbers_documents(batch, zero)
        hashed_contents = _hash(batch, zero) if hashed else zero
        rows += [valid, outside, packed, numbered, hashed_contents]
    return torch.stack(rows).view(-1, len(Counts._fields))


def tell_of_no_labels() -> None:
    """Warn, once per process, of a step in which no label counts in the loss."""
    _tell_once(
        "no label of this step counts (all are -100), so its loss and gradients are 0: check whether texts were "
        "truncated before their answers, or the template marks no token as the assistant's"
    )


def _hash(batch: Mapping[str, Any], zero: Tensor) -> Tensor:
    """Return a 64-bit hash of a batch's integer and boolean tensors (ids, labels, masks). Floating-point tensors are
    left out, because they may differ between ranks by rounding.
    """
    total = zero
    for value in batch.values():
        if (
            isinstance(value, Tensor)
            and not value.is_floating_point()
            and not value.is_complex()
            and value.numel()
        ):
            flat = value.detach().reshape(-1).to(torch.int64)
            flat = flat if flat.device == zero.device else flat.to(zero.device)
            weights = _weights(1 << (flat.numel() - 1).bit_length(), zero.device)
            total = total * 31 + (flat * weights[: len(flat)]).sum()
    return total


@lru_cache(maxsize=32)
def _weights(length: int, device: torch.device) -> Tensor:
    """Return ``length`` odd numbers, the same in every process, as position weights of a hash."""
    return odd_numbers(torch.arange(length, device=device))


def odd_numbers(index: Tensor) -> Tensor:
    """Return a different odd 64-bit number for each index, as weights of a checksum; overflow in the computation is
    intended.
    """
    mixed = (index + 1) * (0x9E3779B97F4A7C15 - _MODULUS)
    return ((mixed ^ (mixed >> 29)) * (0xBF58476D1CE4E5B9 - _MODULUS)) | 1


def agree(
    batches: Sequence[Mapping[str, Any]],
    seen: Tensor | None,
    train: bool,
    group: dist.ProcessGroup | None,
    told: Sequence[int] = (),
    read: Sequence[Tensor] = (),
) -> tuple[list[Counts], list[list[int]]]:
    """Compare this rank's microbatches with those of the other ranks in ``group``, which must be equal, and exchange
    further numbers. Return the counts of this rank's microbatches, and each rank's further numbers.

    Args:
        batches: this rank's microbatches.
        seen: their counts, from :func:`look_at`; ``None`` tells the other ranks that this rank refuses its batch.
        train: whether it is a training step, which must be the same on all ranks.
        group: the ranks that must get the same batch; ``None`` if there is only this rank.
        told: the further numbers that this rank sends.
        read: int64 tensors, possibly on a device, whose values this rank sends, too.

    Raises:
        ConfigError: on all ranks, if their batches differ; on all other ranks, if a rank refuses its batch.
    """
    empty = torch.empty(0, len(Counts._fields), dtype=torch.int64)
    own, *more = _on_host(
        [
            empty if seen is None else seen,
            *(read if group is not None else ()),
        ]
    )
    if group is None:
        return [Counts(*row) for row in own.tolist()], [[*told]]
    shapes = zlib.crc32(repr(train).encode())
    for batch in batches:
        for name, value in batch.items():
            if isinstance(value, Tensor):
                shapes = zlib.crc32(repr((name, *value.shape)).encode(), shapes)
        shapes = zlib.crc32(b"end of a microbatch", shapes)
    about = [int(seen is None), len(batches), shapes]
    content = (own[:, -1] * _weights(1 << len(own).bit_length(), own.device)[: len(own)]).sum()
    mine = torch.cat(
        (
            torch.tensor(about),
            content.view(1),
            torch.tensor(told, dtype=torch.int64),
            *more,
        )
    )
    every = mine.new_empty(dist.get_world_size(group), len(mine))
    group.allgather([list(every)], [mine]).wait()
    # the CPU's only read from the device
    numbers = iter(torch.cat((own.flatten(), every.flatten())).tolist())
    counts = [Counts(*islice(numbers, len(Counts._fields))) for _ in range(len(own))]
    shared = list[_Shared]()
    ranks = list[list[int]]()
    further = len(mine) - len(_Shared._fields)
    for _ in range(len(every)):
        shared.append(_Shared(*islice(numbers, len(_Shared._fields))))
        ranks.append([*islice(numbers, further)])
    if seen is not None and len(set(shared)) > 1:
        raise ConfigError(_different(shared, dist.get_process_group_ranks(group)))
    return counts, ranks


def total_of(
    valid: int,
    refused: ConfigError | None,
    group: dist.ProcessGroup | None,
    passes: int,
) -> int:
    """Return the number of ``valid`` labels in all distinct batches, summed over the ranks of ``group`` on the CPU. All
    ranks raise :class:`ConfigError` if any rank has ``refused`` its batch, or if their numbers of ``passes`` with
    common collectives differ.
    """
    elsewhere = "{} other rank(s) refused their batch of this step: see their error"
    total, every, squares = sum_or_raise((valid, passes, passes**2), group, refused, elsewhere)
    # These sums are consistent only if all ranks have the same number.
    if squares * dist.get_world_size(group) != every**2:
        raise ConfigError(
            f"this rank has {passes} microbatches in this step, but another rank has more or fewer, and data ranks "
            "gather weights or exchange tokens in each microbatch: pass the same number on every rank; for a batch "
            "that hfscale splits into microbatches, set ParallelConfig(num_microbatches=...)"
        )
    return total


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU; all tensors that are on a device are copied together, in one transfer."""
    away = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if not away:
        return tensors
    parts = iter(
        torch.cat([tensor.flatten() for tensor in away])
        .cpu()
        .split([tensor.numel() for tensor in away])
    )
    return [
        tensor if tensor.device.type == "cpu" else next(parts).view(tensor.shape)
        for tensor in tensors
    ]


def _different(ranks: list[_Shared], names: list[int]) -> str:
    if refusing := [str(name) for name, rank in zip(names, ranks, strict=True) if rank.refused]:
        return f"rank(s) {', '.join(refusing)}, which share this rank's batch, refused their batches: see their error"
    given = ", ".join(
        f"rank {name}: {rank.microbatches} microbatches"
        for name, rank in zip(names, ranks, strict=True)
    )
    return (
        "ranks that share a batch (those of one tensor group or pipeline) were given different batches, or some train "
        f"where others evaluate ({given}): ranks with equal hfscale.batch_rank(model) pass the same batch"
    )


def to_device(batches: Sequence[Microbatch], device: torch.device) -> None:
    """Move the microbatches to ``device``; CPU tensors without gradients are copied in one buffer, non-blocking."""
    away = device.type != "cpu"
    together: dict[
        int, tuple[Tensor, list[tuple[Microbatch, str]]]
    ] = {}  # shared tensors are copied once
    for batch in batches:
        for name, value in list(batch.items()):
            if not isinstance(value, Tensor) or value.device == device:
                continue
            if away and value.device.type == "cpu" and not value.requires_grad:
                together.setdefault(id(value), (value, []))[1].append((batch, name))
            else:
                batch[name] = value.to(device, non_blocking=away)
    if together:
        from ...distributed.host_buffers import in_one_buffer, views_of

        tensors = [value for value, _ in together.values()]
        forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        sent = in_one_buffer(tensors, forms, is_accelerator(device)).to(device, non_blocking=True)
        for (_, places), value in zip(
            together.values(),
            views_of(sent, forms),
            strict=True,
        ):
            for batch, name in places:
                batch[name] = value
