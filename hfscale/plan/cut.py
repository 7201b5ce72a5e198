"""How one tensor is cut over one axis: integers in, integers out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Tensor dim ``dim`` is spread over the ``size`` ranks of ``axis``.

    A fused weight is several matrices laid side by side (query, key and value, say): ``parts`` holds their lengths
    along ``dim``, and every rank takes its chunk of *each* part; left empty, the dim is one part. Chunks follow
    ``torch.chunk``: all have ``ceil(length / size)`` entries but the last ones, which may be shorter or empty.
    """

    axis: str
    dim: int
    size: int
    parts: tuple[int, ...] = ()

    def spans(self, length: int, rank: int) -> list[tuple[int, int]]:
        """``(start, stop)`` of each part's chunk on ``rank``, in a dim of ``length`` entries."""
        result, offset = [], 0
        for part in self.parts or (length,):
            step = -(-part // self.size)
            result.append((offset + min(rank * step, part), offset + min((rank + 1) * step, part)))
            offset += part
        return result

    def local_length(self, length: int, rank: int) -> int:
        """How many of ``length`` entries are on ``rank``."""
        return sum(stop - start for start, stop in self.spans(length, rank))

    def take(self, tensor: Tensor, rank: int) -> Tensor:
        """The share of a whole tensor on ``rank``: a view where the cut has one part, else a copy."""
        spans = self.spans(tensor.shape[self.dim], rank)
        pieces = [tensor.narrow(self.dim, start, stop - start) for start, stop in spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def cut_shape(shape: Sequence[int], cuts: Sequence[Cut], ranks: dict[str, int]) -> tuple[int, ...]:
    """Local shape on the rank at coordinates ``ranks`` (axis -> rank) after all ``cuts``, in order."""
    local = list(shape)
    for cut in cuts:
        local[cut.dim] = cut.local_length(local[cut.dim], ranks.get(cut.axis, 0))
    return tuple(local)


def write_share(target: Tensor, share: Tensor, cuts: Sequence[Cut], ranks: dict[str, int]) -> None:
    """Copy one rank's ``share`` into its place in the whole tensor ``target``: the inverse of taking the ``cuts``."""
    if not cuts:
        target.copy_(share)
        return
    cut, *rest = cuts
    spans = cut.spans(target.shape[cut.dim], ranks.get(cut.axis, 0))
    if len(spans) == 1 or not rest:
        offset = 0
        for start, stop in spans:
            view = target.narrow(cut.dim, start, stop - start)
            piece = share if len(spans) == 1 else share.narrow(cut.dim, offset, stop - start)
            write_share(view, piece, rest, ranks)
            offset += stop - start
        return
    # Several parts, cut again: the second cut sees the parts joined, so the write goes through a joined copy.
    joined = torch.cat([target.narrow(cut.dim, start, stop - start) for start, stop in spans], cut.dim)
    write_share(joined, share, rest, ranks)
    write_share(target, joined, [cut], ranks)
