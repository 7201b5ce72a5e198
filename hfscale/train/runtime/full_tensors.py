"""Gather a model's full tensors from the shards of all ranks, a bucket of tensors at a time; no rank holds more than a
bucket and one full tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch_device import is_accelerator
from ..._compat.transformers.stored import never_stored
from ...distributed.host_buffers import Form, buckets, bytes_before, in_one_buffer, views_of
from ...distributed.mesh import Mesh
from ...plan import ParameterPlan, write_share
from ...plan.quantized import coordinates
from .runtime import Runtime
from .shards import local_tensor
from .writing import Attempt, plainly


@dataclass(frozen=True)
class SavedTensor:
    """Describe one tensor to save: its name in the checkpoint, shape and dtype, and the pipeline rank that holds it.
    The description is the same on every rank.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    home: int
    planned: ParameterPlan | None  # None: a buffer, full on every rank of its stage

    @property
    def owned(self) -> str:
        """Return the parameter's name in the plan; :attr:`name` may differ from it, since a tied tensor may be stored
        under another of its names.
        """
        return self.name if self.planned is None else self.planned.name

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the full tensor."""
        return prod(self.shape) * self.dtype.itemsize


def tensors_to_save(runtime: Runtime) -> list[SavedTensor]:
    """Return descriptions of the tensors that transformers would save: parameters in the plan's order, then persistent
    buffers. With pipeline stages, it is collective.
    """
    told = tensors_of_stage(runtime)
    staged = runtime.plan.stages is not None
    return in_order(runtime, runtime.mesh.all_gather_object(told) if staged else [told])


def tensors_of_stage(runtime: Runtime) -> list[tuple[Any, ...]]:
    """Return descriptions of the tensors that this pipeline stage saves, as tuples for :func:`in_order`. One rank per
    stage returns them; the others return an empty list.
    """
    home = runtime.mesh.pp_rank
    if runtime.plan.stages is not None and not runtime.mesh.speaks_for_stage:
        return []
    parameters = [
        (_kept_name(runtime, planned), planned.shape, parameter.dtype, home, planned.name)
        for planned, parameter in runtime.parameters()
        if runtime.counts(planned)
    ]
    buffers = _buffers(runtime).items()
    return parameters + [
        (name, tuple(buffer.shape), buffer.dtype, home, "") for name, buffer in buffers
    ]


def in_order(runtime: Runtime, told: list[list[tuple[Any, ...]]]) -> list[SavedTensor]:
    """Merge the descriptions that all pipeline stages returned from :func:`tensors_of_stage` into one list of tensors
    to save, parameters in the plan's order; not collective.
    """
    plan = runtime.plan
    ignored = never_stored(runtime.model)
    saved = [
        SavedTensor(name, torch.Size(shape), dtype, home, plan.by_name.get(planned))
        for entries in told
        for name, shape, dtype, home, planned in entries
    ]
    places = {planned.name: place for place, planned in enumerate(plan.owned())}
    saved.sort(key=lambda entry: places[entry.planned.name] if entry.planned else len(places))
    # If several stages have a buffer, the first stage saves it.
    first = {entry.name: entry for entry in reversed(saved)}
    return [entry for entry in saved if first[entry.name] is entry and entry.name not in ignored]


def _kept_name(runtime: Runtime, planned: ParameterPlan) -> str:
    """Return the name under which transformers stores a parameter. A tied parameter may be stored under another name
    than its first one in the model.
    """
    source = runtime.model.all_tied_weights_keys.get(planned.name)
    by_name = runtime.plan.by_name
    return source if source in by_name and by_name[source].tied_to == planned.name else planned.name


def _buffers(runtime: Runtime) -> dict[str, Tensor]:
    """Return the model's persistent buffers by name; they are full and equal on every rank."""
    saved = runtime.model.state_dict(keep_vars=True).keys()  # without detaching every parameter
    return {name: buffer for name, buffer in runtime.model.named_buffers() if name in saved}


def full_tensors(
    runtime: Runtime,
    entries: list[SavedTensor],
    share_of: Callable[[SavedTensor], Tensor | None] | None = None,
    attempt: Attempt = plainly,
    to: Sequence[int] = (0,),
) -> Iterator[tuple[SavedTensor, Tensor]]:
    """Yield every tensor of ``entries``, one at a time, in the same order on every rank: the full tensor on the ranks
    in ``to`` (global ranks), and an empty tensor on all others.

    Tensors are gathered in buckets of the size of the largest tensor, so that many small tensors need few messages:
    each rank sends its shards of all tensors in a bucket to every rank in ``to``, in one message.

    Args:
        entries: the tensors to gather.
        share_of: returns this rank's shard of an entry; by default, that of the model's own parameter. Other tensors,
            such as an optimizer's states, must be sharded in the same way.
        attempt: runs every operation that may fail on only one rank. After a failure, shards are still exchanged, so
            that no rank waits, but the values are meaningless.
        to: the global ranks that get full tensors.
    """
    gathering = _Gathering(runtime.mesh, share_of or shares(runtime), to, attempt)
    for bucket in buckets(
        entries, attrgetter("nbytes"), max((entry.nbytes for entry in entries), default=0)
    ):
        yield from gathering.full(bucket)


def shares(runtime: Runtime) -> Callable[[SavedTensor], Tensor | None]:
    """Return a function that maps a tensor to save to this rank's shard of it, or to ``None`` if this rank has none."""
    here = {planned.name: parameter for planned, parameter in runtime.parameters()}
    buffers = _buffers(runtime)

    def share_of(entry: SavedTensor) -> Tensor | None:
        held = here.get(entry.planned.name) if entry.planned else buffers.get(entry.name)
        return None if held is None else local_tensor(held).detach()

    return share_of


# One shard of a tensor: the coordinates of its ranks on the axes that shard the tensor.
_Piece = tuple[SavedTensor, dict[str, int]]


def _forms(pieces: Sequence[_Piece]) -> list[Form]:
    return [
        (piece.planned.local_shape(at) if piece.planned else piece.shape, piece.dtype)
        for piece, at in pieces
    ]


def _pieces(
    bucket: list[SavedTensor],
    mesh: Mesh,
    to: Sequence[int],
) -> dict[int, list[_Piece]]:
    """Return, for each rank, the shards of a bucket that it sends, in order. An unsharded tensor is not sent if the
    rank that holds it is the only receiver.
    """
    result: dict[int, list[_Piece]] = {}
    for entry in bucket:
        cuts = entry.planned.cuts if entry.planned else ()
        for ranks in coordinates(cuts):
            source = mesh.rank_at(cuts, ranks, entry.home)
            if cuts or tuple(to) != (source,):
                result.setdefault(source, []).append((entry, ranks))
    return {source: pieces for source, pieces in result.items() if bytes_before(_forms(pieces))[-1]}


@dataclass(frozen=True)
class _Gathering:
    """Gather full tensors bucket by bucket; see :func:`full_tensors` for the fields."""

    mesh: Mesh
    share_of: Callable[[SavedTensor], Tensor | None]
    to: Sequence[int]
    attempt: Attempt

    def full(self, bucket: list[SavedTensor]) -> Iterator[tuple[SavedTensor, Tensor]]:
        """Yield the tensors of one bucket: full tensors on the receiving ranks, and empty tensors on all others."""
        shards: dict[int, list[tuple[dict[str, int], Tensor]]] = {}
        pieces = {} if self.mesh.control is None else _pieces(bucket, self.mesh, self.to)
        for source, flat in self._exchanged(pieces).items():
            for (entry, ranks), share in zip(
                pieces[source], views_of(flat, _forms(pieces[source])), strict=True
            ):
                shards.setdefault(id(entry), []).append((ranks, share))
        for entry in bucket:
            wanted = self.mesh.control is None or self.mesh.rank in self.to
            whole = self._put_together(entry, shards.get(id(entry), [])) if wanted else None
            yield entry, torch.empty(0, dtype=entry.dtype) if whole is None else whole

    def _exchanged(self, pieces: dict[int, list[_Piece]]) -> dict[int, Tensor]:
        """Send the bytes of this rank's shards in a bucket to the receiving ranks. On these, return the bytes that each
        rank sent, by rank; on all others, return an empty dict.
        """
        rank = self.mesh.rank
        group = self.mesh.control
        sizes = {source: bytes_before(_forms(own))[-1] for source, own in pieces.items()}
        wanted = [source for source in sizes if source != rank] if rank in self.to else []
        sent = {source: torch.empty(sizes[source], dtype=torch.uint8) for source in wanted}
        works = [dist.irecv(flat, src=source, group=group) for source, flat in sent.items()]
        if rank in pieces:
            own = self.attempt(self._copied, pieces[rank])
            flat = torch.empty(sizes[rank], dtype=torch.uint8) if own is None else own
            works += [
                dist.isend(flat, dst=other, group=group) for other in self.to if other != rank
            ]
            sent |= {rank: flat} if rank in self.to else {}
        for work in filter(None, works):
            work.wait()
        return sent

    def _copied(self, pieces: list[_Piece]) -> Tensor:
        """Copy the shards of a bucket that this rank sends into one buffer of bytes on the CPU; from a GPU, by one
        transfer to pinned memory.
        """
        # An optimizer has no state for empty shards.
        filled = [piece for piece in pieces if prod(_forms([piece])[0][0])]
        held = [share for entry, _ in filled if (share := self.share_of(entry)) is not None]
        flat = in_one_buffer(held, _forms(filled))
        if not is_accelerator(flat.device):
            return flat
        return torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True).copy_(flat)

    def _put_together(
        self, entry: SavedTensor, shards: list[tuple[dict[str, int], Tensor]]
    ) -> Tensor | None:
        """Join the shards of a tensor, as received from other ranks, to the full tensor; ``None`` if this fails. If no
        shards were sent, this rank already has the full tensor, and returns it.
        """
        if not shards:
            own = self.share_of(entry)
            return torch.empty(entry.shape, dtype=entry.dtype) if own is None else own
        cuts = entry.planned.cuts if entry.planned else ()
        if not cuts:
            return shards[0][1]
        whole = self.attempt(partial(torch.empty, entry.shape, dtype=entry.dtype))
        for ranks, share in shards:
            self.attempt(write_share, whole, share, cuts, ranks)
        return whole
