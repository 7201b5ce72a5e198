"""Check that all ranks that hold the same parameter (replicas) hold the same bits, by an exchange of checksums.

Tensor ranks replicate norms and adapter factors, some of them also key/value heads; data ranks replicate whole
parameters; and two pipeline stages may hold a tied head. Replicas stay equal only while all ranks make the same
updates. If, for example, each rank clips by the norm of its own shards, replicas drift apart without an error, and a
checkpoint would hold the values of one rank.

The checksum is a sum over a shard's bits, weighted by position, modulo 2**64. It works for every dtype, including 4-bit
weights, and for NaN. It reads each replicated tensor once and needs no extra memory.

On the CPU, equal work gives equal bits. GPU kernels may add in a different order each time, so replicas may drift apart
by accumulated rounding. Such a small difference gives a warning; a difference that rounding cannot explain raises an
error.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from math import isqrt

import torch
from torch import Tensor

from ...errors import CheckpointError, ConfigError
from ...plan import ParameterPlan
from ...plan.cut import share_spans
from ..runtime import Runtime, local_tensor
from ..runtime.batches import odd_numbers

_WIDTHS = (64, 4096)
# Relative to a tensor's largest entry: on a GPU, larger differences cannot come from rounding. On the CPU, no
# difference can.
_ROUNDINGS = 1e-3
_TOLERANCES = {"cpu": 0.0}
_LOOKED_AT = 16  # parameters whose drift is measured
_ENTRIES = 256  # entries that are compared per parameter

_Place = tuple[tuple[tuple[int, int], ...], ...]
"""The position of a shard in its full parameter: for each dim, the intervals of indices. Shards of equal position are
replicas.
"""

_log = logging.getLogger(__name__)


def check_replicas(runtime: Runtime, saving: str | None = None) -> None:
    """Check that all ranks that hold the same entries of a parameter hold the same values; collective. If they differ,
    raise an error on every rank; on devices other than the CPU, only warn of a difference that rounding can explain.

    Args:
        saving: the name of the save that follows, for the error; the error is then a :class:`CheckpointError`.
    """
    if runtime.mesh.control is None or not any(
        _is_replicated(runtime, planned) for planned in runtime.plan.owned()
    ):
        return
    apart = _differing_parameters(runtime.mesh.all_gather_object(_checksums(runtime)))
    if not apart:
        return
    tolerance = _TOLERANCES.get(runtime.mesh.device.type, _ROUNDINGS)
    if (
        tolerance == 0.0
        or (drift := _drift(runtime, {name for name, _ in apart[:_LOOKED_AT]})) > tolerance
    ):
        cause = _cause(apart)
        if saving is None:
            raise ConfigError(f"{cause} Load the model again: the ranks no longer hold one model")
        raise CheckpointError(
            f"{saving} would write the values of one rank, but ranks have different values: {cause} Nothing was "
            "written; check_replicas=False writes the values of the first ranks anyway"
        )
    if runtime.mesh.is_first:
        _log.warning(
            "%s The relative difference between the ranks' values is only %.0e, which rounding can explain, so "
            "no error is raised.",
            _cause(apart),
            drift,
        )


def _checksums(runtime: Runtime) -> dict[tuple[str, _Place], int]:
    """Return the checksums of this rank's shards of replicated parameters, by the parameter's name and the shard's
    position.
    """
    sums = {
        (planned.name, spans): checksum(piece)
        for planned, parameter in runtime.parameters()
        if _is_replicated(runtime, planned)
        for spans, piece in _pieces(runtime, planned, parameter)
    }
    read = torch.stack(list(sums.values())).tolist() if sums else []  # one device sync
    return dict(zip(sums, read, strict=True))


def _differing_parameters(
    every: list[dict[tuple[str, _Place], int]],
) -> list[tuple[str, list[list[int]]]]:
    """Return the names of the parameters whose replicas have different checksums, each with groups of ranks: ranks of a
    group have the same checksum. ``every`` holds the checksums of each rank.
    """
    values: dict[tuple[str, _Place], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, held in enumerate(every):
        for place, value in held.items():
            values[place][value].append(rank)
    return [
        (place[0], list(by_value.values()))
        for place, by_value in values.items()
        if len(by_value) > 1
    ]


def _drift(runtime: Runtime, names: set[str]) -> float:
    """Return the largest difference between replicas of the parameters ``names``, relative to the tensor's largest
    compared entry. At most 256 entries of each tensor are compared.
    """
    mine: dict[tuple[str, _Place], list[float]] = {}
    for planned, parameter in runtime.parameters():
        if planned.name in names:
            for spans, piece in _pieces(runtime, planned, parameter):
                entries = piece.flatten()[:: -(-piece.numel() // _ENTRIES) or 1]
                mine[planned.name, spans] = entries.double().tolist()
    worst = 0.0
    first = dict[tuple[str, _Place], list[float]]()
    for held in runtime.mesh.all_gather_object(mine):
        for place, entries in held.items():
            known = first.setdefault(place, entries)
            scale = max(map(abs, known), default=0.0) or 1.0
            for a, b in zip(known, entries, strict=True):
                apart = 0.0 if a == b or (a != a and b != b) else abs(a - b) / scale
                worst = max(worst, apart if apart == apart else float("inf"))
    return worst


def checksum(share: Tensor) -> Tensor:
    """Return a 64-bit checksum of all bits of a tensor, as an integer scalar on the tensor's device."""
    data = share.contiguous().view(-1)
    if data.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=share.device)
    data = data.view(torch.uint8)
    if data.data_ptr() % 8:
        data = data.clone()
    words = data[: len(data) // 8 * 8].view(torch.int64)
    rest = data[len(data) // 8 * 8 :]
    width = min(max(isqrt(len(words)), _WIDTHS[0]), _WIDTHS[1])
    rows = len(words) // width
    table = words[: rows * width].view(rows, width)
    last = words[rows * width :]
    # Row sums and column sums are both weighted, so swapping two words changes the checksum.
    parts = [table.sum(0), table.sum(1), last, rest.long()]
    total = torch.zeros_like(parts[0][0])
    for salt, part in enumerate(parts):  # position-weighted sums; overflow is intended
        total += (
            part * odd_numbers(torch.arange(len(part), device=part.device) + (salt << 48))
        ).sum()
    return total


def _is_replicated(runtime: Runtime, planned: ParameterPlan) -> bool:
    """Return whether several ranks hold the same entries of a parameter; the answer is the same on every rank."""
    layout = runtime.mesh.layout
    spread = planned.cut_over("ep") is not None
    free = runtime.mesh.free_axes(planned.cuts)
    sizes = (layout.size("expert_tp" if axis == "tp" and spread else axis) for axis in free)
    return (
        max(sizes, default=1) > 1
        or planned.replicas > 1
        or len(runtime.plan.holders(planned.name)) > 1
    )


def _pieces(
    runtime: Runtime, planned: ParameterPlan, parameter: Tensor
) -> Iterator[tuple[_Place, Tensor]]:
    """Yield this rank's shard of a parameter with its position in the full parameter. A fused weight is yielded matrix
    by matrix (query, key, value), because only some of its matrices may be replicated.
    """
    share, (_, ranks) = local_tensor(parameter.detach()), runtime.mesh.view(planned.cuts)
    spans = share_spans(planned.shape, planned.cuts, ranks)
    fused = next(
        (cut for cut in planned.cuts if cut.most_replicas > 1 and len(cut.parts) > 1), None
    )
    # Quantized weights have no rows and columns.
    if fused is None or share.shape != planned.local_shape(ranks):
        yield tuple(tuple(dim) for dim in spans), share
        return
    offset = 0
    for stop, length in zip(accumulate(fused.parts), fused.parts, strict=True):
        low = stop - length
        inside = tuple(
            (
                max(a, low),
                min(b, stop),
            )
            for a, b in spans[fused.dim]
            if max(a, low) < min(b, stop)
        )
        size = sum(b - a for a, b in inside)
        place = tuple(inside if dim == fused.dim else tuple(ends) for dim, ends in enumerate(spans))
        yield place, share.narrow(fused.dim, offset, size)
        offset += size


def _cause(apart: list[tuple[str, list[list[int]]]]) -> str:
    name, groups = apart[0]
    ranks = "; ".join(", ".join(map(str, group)) for group in groups)
    others = len({other for other, _ in apart}) - 1
    more = f", and {others} more parameters likewise" if others else ""
    return (
        f"{name} is not the same on all ranks that hold it together (it differs between ranks {ranks}{more}): each "
        "rank made a different update. torch.nn.utils.clip_grad_norm_ and accelerate.Accelerator.clip_grad_norm_ "
        "cause this, because each rank computes only a part of the norm: call hfscale.clip_grad_norm_(model, "
        "max_norm). Ranks that were given different batches where hfscale.batch_rank is the same, and code that "
        "changes weights on some ranks only, also cause this."
    )
