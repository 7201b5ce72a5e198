"""Check whether the shards of a tensor consist of complete blocks of the flattened tensor: integers in, a bool out.

8-bit optimizers quantize a state in blocks of consecutive entries of the flattened tensor, each block with a scale of
its own (Dettmers et al. 2022). A shard can be stepped on its own, with the same result, if every block of the full
tensor is on one rank, contiguous, and begins at a block boundary of the flattened shard::

    [4, 512] cut along dim 1 over 2, blocks of 256      row 0: | block 0: rank 0 | block 1: rank 1 |
                                                        row 1: | block 2: rank 0 | block 3: rank 1 | ...
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import prod

from .cut import Cut, Spans, cut_shape, share_spans
from .parameter import ParameterPlan


@cache
def flat_blocks_align(planned: ParameterPlan, block: int) -> bool:
    """Return whether each rank's shard consists of complete blocks of ``block`` entries of the flattened tensor, whose
    last block may be shorter. May be ``False`` for blocks that align where runs of a shard touch across rows.
    """
    return all(
        runs_align(planned.shape, share_spans(planned.shape, planned.cuts, ranks), block)
        for ranks in coordinates(planned.cuts)
    )


@cache
def some_share_is_empty(planned: ParameterPlan) -> bool:
    """Return whether some rank holds no entries of the parameter."""
    return any(prod(cut_shape(planned.shape, planned.cuts, ranks)) == 0 for ranks in coordinates(planned.cuts))


def coordinates(cuts: Sequence[Cut]) -> Iterator[dict[str, int]]:
    """Yield the coordinates (axis -> rank) of every shard that ``cuts`` make."""
    for ranks in product(*(range(cut.size) for cut in cuts)):
        yield {cut.axis: rank for cut, rank in zip(cuts, ranks, strict=True)}


def runs_align(shape: Sequence[int], spans: Sequence[Spans], block: int) -> bool:
    """Return whether a shard's runs of consecutive entries, ``spans`` per dim, are blocks of the flattened whole."""
    if not all(spans):
        return True  # an empty share has no block
    cut = [dim for dim, size in enumerate(shape) if spans[dim] != [(0, size)]]
    if not cut:
        return True
    # Runs of consecutive entries lie along the last dim that is cut, over all that is behind it.
    dim, offset = cut[-1], 0
    for outer in range(dim):
        step = prod(shape[outer + 1 :])
        if step % block:  # at most one index, or not every run can begin at a border
            if sum(stop - start for start, stop in spans[outer]) > 1:
                return False
            offset += spans[outer][0][0] * step
    inner, total = prod(shape[dim + 1 :]), prod(shape)
    runs = [(offset + low * inner, offset + high * inner) for low, high in spans[dim]]
    return all(begin % block == 0 and (end % block == 0 or end == total) for begin, end in runs)
