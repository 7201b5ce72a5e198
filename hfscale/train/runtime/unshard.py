"""Gather a cut tensor on every rank that holds a shard of it."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import all_gather
from ...plan import Cut
from ...plan.cut import cut_shape


def gather_full(share: Tensor, shape: Sequence[int], cuts: Sequence[Cut], mesh: Mesh) -> Tensor:
    """Return the full tensor of which this rank holds ``share``, by undoing its ``cuts`` in reverse order.

    Every rank that differs only in the coordinates of these cuts must call it. No autograd.

    Args:
        share: this rank's shard, a plain tensor; may be empty.
        shape: of the full tensor.
        cuts: in the order in which they were made.
    """
    whole = share.detach()
    for done in reversed(range(len(cuts))):
        cut = cuts[done]
        group = mesh.group(cut.axis)
        if group is None:
            continue
        length = cut_shape(shape, cuts[:done], mesh.ranks)[cut.dim]
        lengths = [cut.local_length(length, rank) for rank in range(cut.size)]
        every = all_gather(whole, lengths, cut.dim, group)
        if not cut.parts and cut.most_replicas == 1:
            whole = every
            continue
        whole = every.new_empty([length if dim == cut.dim else size for dim, size in enumerate(every.shape)])
        offset = 0
        for rank in range(dist.get_world_size(group)):
            for start, stop in cut.spans(length, rank):
                whole.narrow(cut.dim, start, stop - start).copy_(every.narrow(cut.dim, offset, stop - start))
                offset += stop - start
    return whole
