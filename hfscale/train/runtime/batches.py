"""Check the microbatches of a step, compare them between the ranks that share them, and copy them to the device.

Batches usually come from a loader on the CPU and are checked there, before they are copied, so the host never waits for
a device. Batches that are already on the device are read back once, whatever their number. The checks of a step and the
messages between ranks are put into one tensor and read by the host together::

    per microbatch [valid labels, ids out of the vocabulary, packed, numbered, hash] --+
    per rank: refused?, number, shapes, hashes, pipeline stages' report              --+--gloo--> one read by the host
"""

import inspect
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch_device import is_accelerator
from ..._compat.transformers.computing import holds_documents, told_apart_by
from ...distributed.host_buffers import in_one_buffer, views_of
from ...errors import ConfigError
from ...plan.feature_plans import ROUTES
from .writing import sum_or_raise

_tell_once = lru_cache(logging.getLogger(__name__).warning)
Look = Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]
"""Count the valid labels of a microbatch, and its labels outside of the vocabulary."""

# Transformers' FlashAttentionKwargs.
BORDERS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)
_PLAIN = {
    "input_ids",
    "labels",
    "shift_labels",
    "attention_mask",
    "position_ids",
    "use_cache",
    "num_items_in_batch",
}
_PLAIN |= {*BORDERS, ROUTES}


class Counts(NamedTuple):
    """Hold the numbers that the host reads from one microbatch."""

    valid: int
    outside: int  # labels and ids outside of the vocabulary
    packed: int
    numbered: int  # whether a mask [rows, tokens] has other numbers than 0 and 1, and nothing says what they mean
    hash: int


class _Shared(NamedTuple):
    """Hold the facts that ranks with a common batch must agree on."""

    refused: int
    microbatches: int
    shapes: int
    contents: int


class Microbatch(dict[str, Any]):
    """Hold the keyword arguments of one forward pass, and facts about them on the host."""

    valid: int | None = None  # number of valid labels; ``None``: not known
    restarts: bool = False  # whether positions restart within its rows
    # Whether its labels are already shifted: each is the target of the token beside it.
    shifted: bool = False
    # tokens per sample in this rank's hidden states if the sequence is cut; ``None``: all of them
    tokens: int | None = None
    parts: int = 1  # into how many microbatches the batch that was given is cut

    @property
    def packed(self) -> bool | None:
        """Return whether positions restart within rows; ``None``: unknown without reading the tensors."""
        # Models may derive other positions from inputs that are not text.
        return self.restarts if self.restarts or self.keys() <= _PLAIN or self.shifted else None

    def learn(self, counts: Counts) -> None:
        """Take the facts that :func:`agree` returned for it."""
        self.valid, self.restarts = (
            counts.valid,
            bool(counts.packed) and told_apart_by(self) == "positions",
        )

    def like(self, values: Mapping[str, Any]) -> "Microbatch":
        """Return a microbatch of other arguments with the attributes of this one."""
        other = Microbatch(values)
        vars(other).update(vars(self))
        return other


def look_at(
    batches: Sequence[Mapping[str, Any]],
    look: Look,
    hashed: bool,
    tokens: int | None = None,
) -> Tensor:
    """Return the :class:`Counts` of microbatches, ``[microbatches, 5]``, on their device; never waits for it. Hash the
    contents if other ranks are given the same batch (``hashed``). ``tokens`` is the size of the vocabulary, to count
    input ids outside of it: a sharded embedding would not fail on them.
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
        documents = holds_documents(batch)
        packed = zero if documents is None else documents.to(zero.device, zero.dtype)
        rows += [
            valid,
            outside,
            packed,
            _numbers_documents(batch, zero),
            _hash(batch, zero) if hashed else zero,
        ]
    return torch.stack(rows).view(-1, len(Counts._fields))


def _numbers_documents(batch: Mapping[str, Any], zero: Tensor) -> Tensor:
    """Return whether a mask of a batch numbers documents, for which no ``position_ids`` speak."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or batch.get("position_ids") is not None:
        return zero
    if mask.ndim != 2 or mask.dtype == torch.bool or not mask.numel():
        return zero
    return (mask.amax() > 1).to(zero.device, zero.dtype)


def has_numbered_documents(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch's mask has numbers of documents and nothing else tells them apart; reads the mask."""
    return bool(_numbers_documents(batch, torch.zeros((), dtype=torch.int64)))


def tell_of_numbers() -> None:
    """Warn, once per process, of a mask that numbers documents."""
    _tell_once(
        "attention_mask has numbers above 1, as if it numbered the documents of a row: transformers takes every number "
        "but 0 for 1, so that documents see each other; give position_ids that begin anew with each document"
    )


def tell_of_no_labels() -> None:
    """Warn, once per process, of a step without a label that counts."""
    _tell_once(
        "no label of this step counts (all are -100): its loss is 0 and no gradient follows from it; see whether texts "
        "were cut before their answers, or the template marks no token as the assistant's"
    )


def _hash(batch: Mapping[str, Any], zero: Tensor) -> Tensor:
    """Hash the integer and boolean tensors (ids, labels, masks) into 64 bits; floats may differ by rounding."""
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
    """Return random odd numbers, the same in every process."""
    drawn = torch.randint(
        2**62,
        (length,),
        generator=torch.Generator().manual_seed(length),
    )
    return (drawn * 2 + 1).to(device, non_blocking=True)


def agree(
    batches: Sequence[Mapping[str, Any]],
    seen: Tensor | None,
    train: bool,
    group: dist.ProcessGroup | None,
    told: Sequence[int] = (),
    read: Sequence[Tensor] = (),
) -> tuple[list[Counts], list[list[int]]]:
    """Return the counts of this rank's microbatches and, per rank of ``group``, which shares them, what it sent
    besides: the integers ``told`` and the int64 tensors ``read``, still on a device. ``seen`` is the result of
    :func:`look_at`; ``None`` if this rank refuses its batch, which the others are told. All of the ranks raise
    :class:`ConfigError` if they were given different batches.
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
    shapes = [
        [(name, tuple(v.shape)) for name, v in batch.items() if isinstance(v, Tensor)]
        for batch in batches
    ]
    about = [
        int(seen is None),
        len(batches),
        zlib.crc32(repr((shapes, train)).encode()),
    ]
    content = (own[:, -1] * _weights(1 << len(own).bit_length(), own.device)[: len(own)]).sum()
    mine = torch.cat(
        (
            torch.tensor(about),
            content.view(1),
            torch.tensor(told, dtype=torch.int64),
            *more,
        )
    )
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    group.allgather([every], [mine]).wait()
    flat = torch.cat((own.flatten(), *every)).tolist()  # the only read by the host
    rows, *ranks = [
        flat[: own.numel()],
        *_parts(flat[own.numel() :], len(mine)),
    ]
    same = len(_Shared._fields)
    shared = [_Shared(*rank[:same]) for rank in ranks]
    if seen is not None and any(shared_values != shared[0] for shared_values in shared):
        raise ConfigError(_different(shared, dist.get_process_group_ranks(group)))
    return [Counts(*row) for row in _parts(rows, len(Counts._fields))], [
        rank[same:] for rank in ranks
    ]


def _parts(numbers: list[int], length: int) -> list[list[int]]:
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]


def total_of(
    valid: int,
    refused: ConfigError | None,
    group: dist.ProcessGroup | None,
    counts: bool,
    passes: int,
) -> int:
    """Return the number of valid labels in all distinct batches, summed over ``group`` on the host (``None``: one
    batch); of the ranks that share a batch, one ``counts``. All raise :class:`ConfigError` if one has ``refused`` its
    batch, or if their numbers of ``passes``, in which ranks run collectives together, differ.
    """
    numbers = [valid if counts or group is None else 0, passes, passes**2]
    elsewhere = "{} other rank(s) refused their batch of this step: see their error"
    total, every, squares = sum_or_raise(numbers, group, refused, elsewhere)
    # Equal only if all have the same.
    if group is not None and squares * dist.get_world_size(group) != every**2:
        raise ConfigError(
            f"this rank has {passes} microbatches in this step and another has more or fewer, and data ranks "
            "gather weights, or exchange tokens, in each: pass as many on every rank; of a batch that is cut into "
            "them, say how many with ParallelConfig(num_microbatches=...)"
        )
    return total


def _on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, with one copy for all that are on a device."""
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
        return f"rank(s) {', '.join(refusing)}, which share this rank's batch, refused theirs: see their error"
    given = ", ".join(
        f"rank {name}: {rank.microbatches} microbatches"
        for name, rank in zip(names, ranks, strict=True)
    )
    return (
        "ranks that share a batch (those of one tensor group or pipeline) were given different batches, or some train "
        f"where others evaluate ({given}): ranks with equal hfscale.batch_rank(model) pass the same batch"
    )


def with_borders(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Add the ``cu_seq_lens`` arguments by which flash attention keeps packed examples apart; refuse models that take
    none. Without them, transformers derives borders from ``position_ids`` by a device sync in every layer if there is
    one row, and attends across examples if there are several.
    """
    if batch.get("attention_mask") is not None or any(
        batch.get(name) is not None for name in BORDERS
    ):
        return dict(batch)
    rows = max(
        len(batch[name])
        for name in ("input_ids", "inputs_embeds", "labels")
        if batch.get(name) is not None
    )
    if all(
        kind.kind != kind.VAR_KEYWORD
        for kind in inspect.signature(model.forward).parameters.values()
    ):
        if rows == 1:
            return dict(batch)
        raise ConfigError(
            f"{type(model).__name__} does not take the borders of {rows} packed rows, and flash attention would attend "
            "across their examples: use microbatches of one row, or attn_implementation='sdpa'"
        )
    positions = batch["position_ids"].cpu().expand(rows, -1)
    begins = nn.functional.pad(
        positions.diff(dim=-1) != 1,
        (1, 0),
        value=True,
    ).flatten()
    starts = nn.functional.pad(
        begins.nonzero().squeeze(1),
        (0, 1),
        value=begins.numel(),
    ).to(torch.int32)
    longest = int(starts.diff().max())
    return {
        **batch,
        **dict(zip(BORDERS, (starts, starts, longest, longest), strict=True)),
    }


def to_device(batches: Sequence[Microbatch], device: torch.device) -> list[Microbatch]:
    """Return the microbatches on ``device``: CPU tensors without gradients by one non-blocking copy of one buffer."""
    moved = [batch.like(batch) for batch in batches]
    away = device.type != "cpu"
    together: dict[
        int, tuple[Tensor, list[tuple[Microbatch, str]]]
    ] = {}  # shared tensors are copied once
    for batch in moved:
        for name, value in [
            (name, v) for name, v in batch.items() if isinstance(v, Tensor) and v.device != device
        ]:
            if away and value.device.type == "cpu" and not value.requires_grad:
                together.setdefault(id(value), (value, []))[1].append((batch, name))
            else:
                batch[name] = value.to(device, non_blocking=away)
    if together:
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
    return moved
