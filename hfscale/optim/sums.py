"""All-reduces over the ranks of parameters' cuts, batched over many tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..distributed.mesh import Mesh
from ..distributed.ops.collectives import all_reduce
from ..plan.flat_blocks import some_share_is_empty
from .sharded import Member

Piece = tuple[Tensor, tuple[str, ...]]
"""A tensor, and the axes to all-reduce it over."""


def sum_over_ranks(pieces: Sequence[Piece], mesh: Mesh) -> list[Tensor]:
    """All-reduce every piece over its axes: one collective per axis, on all pieces concatenated.

    Every rank of a pipeline stage passes pieces of the same axes in the same order, and ranks of one group, of the same
    shapes. The result is bitwise the same on all ranks that were summed over.
    """
    found = [piece for piece, _ in pieces]
    for axis in sorted({axis for _, axes in pieces for axis in axes}):
        group = mesh.group(axis)
        if group is None:
            continue
        chosen = [index for index, (_, axes) in enumerate(pieces) if axis in axes]
        wide = torch.float64 if any(found[index].dtype == torch.float64 for index in chosen) else torch.float32
        flat = all_reduce(torch.cat([found[index].reshape(-1).to(wide) for index in chosen]), group)
        parts = flat.split([found[index].numel() for index in chosen])
        for index, part in zip(chosen, parts, strict=True):
            found[index] = part.view(found[index].shape).to(found[index].dtype)
    return found


def gradients_present(members: Sequence[Member], mesh: Mesh) -> list[bool]:
    """Return for each member whether it has a gradient on the ranks of its cuts; the same answer on all of these.

    A rank with entries of a parameter knows. Autograd may leave a rank with an empty shard without a gradient: if there
    are such ranks, they ask the others.
    """
    present = [member.parameter.grad is not None for member in members]
    doubtful = [index for index, member in enumerate(members) if some_share_is_empty(member.planned)]
    if doubtful:
        flags = torch.tensor([float(present[index]) for index in doubtful], device=mesh.device)
        pieces = [(flag, members[index].axes) for index, flag in zip(doubtful, flags.unbind(), strict=True)]
        for index, total in zip(doubtful, torch.stack(sum_over_ranks(pieces, mesh)).tolist(), strict=True):
            present[index] = total > 0
    return present
