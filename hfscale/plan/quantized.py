"""Define the plan of quantized weights, and check whether a tensor's shards are quantized in the same blocks as the
full tensor: shards of quantized weights, and of the states of 8-bit optimizers.

A 4-bit weight is quantized in blocks of 64 consecutive values of the matrix in row-major order, each with its own scale
(QLoRA, Dettmers et al. 2023). An 8-bit weight has one scale per row (LLM.int8(), Dettmers et al. 2022). A rank
quantizes its shard as a separate matrix. If every block of the shard is also a block of the full matrix, the rank's
values equal those of the quantized full matrix bit by bit. If a shard ends inside a block of the full matrix, the
shard's blocks have other values, and other scales::

    row of 128 values on two ranks     blocks 0-63 and 64-127; ranks hold 0-63 and 64-127: the blocks are equal
    row of 96 values on two ranks      a block is 0-63; ranks hold 0-47 and 48-95: the blocks differ
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil, prod

from .cut import Cut, Spans, cut_shape, share_spans
from .parameter import ParameterPlan

BLOCK = 64  # values per scale in 4 bits
# In double quantization, the number of scales that are quantized with one outer scale
OUTER_BLOCK = 256
_CODE = 4 * 16  # bytes of a weight's table of 4-bit values
_OUTER_CODE = 4 * 256


@cache
def flat_blocks_align(planned: ParameterPlan, block: int) -> bool:
    """Return whether the shard of every rank consists of whole blocks of the full tensor, where a block is ``block``
    consecutive entries of the flattened tensor; only the tensor's last block may be shorter.

    8-bit optimizers quantize a parameter's state in such blocks, each with its own scale (Dettmers et al. 2022). A
    shard is updated like the full tensor only if every block of the full tensor is contiguous on one rank, and begins
    at a block boundary of the flattened shard::

        [4, 512] sharded along dim 1 over 2, blocks of 256  row 0: | block 0: rank 0 | block 1: rank 1 |
                                                            row 1: | block 2: rank 0 | block 3: rank 1 | ...

    The check is conservative: it may return ``False`` for a shard of whole blocks, if a block of the shard continues in
    the shard's next row.
    """
    return all(
        runs_align(planned.shape, share_spans(planned.shape, planned.cuts, ranks), block)
        for ranks in coordinates(planned.cuts)
    )


@cache
def some_share_is_empty(planned: ParameterPlan) -> bool:
    """Return whether the parameter's shard on some rank is empty."""
    return any(
        prod(cut_shape(planned.shape, planned.cuts, ranks)) == 0
        for ranks in coordinates(planned.cuts)
    )


def coordinates(cuts: Sequence[Cut]) -> Iterator[dict[str, int]]:
    """Yield the coordinates (axis -> rank) of every shard of a parameter that is sharded as ``cuts`` describe, one
    entry per mesh axis.
    """
    for ranks in product(*(range(cut.size) for cut in cuts)):
        yield {cut.axis: rank for cut, rank in zip(cuts, ranks, strict=True)}


def runs_align(shape: Sequence[int], spans: Sequence[Spans], block: int) -> bool:
    """Return whether a shard consists of whole blocks of the flattened full tensor, each of ``block`` consecutive
    entries. ``spans`` holds, for each dim of the full tensor of shape ``shape``, the intervals of indices in the shard.
    """
    if not all(spans):
        return True  # an empty shard has no block
    cut = [dim for dim, size in enumerate(shape) if spans[dim] != [(0, size)]]
    if not cut:
        return True
    # Runs of consecutive entries extend along the last sharded dim and all dims after it.
    dim = cut[-1]
    offset = 0
    for outer in range(dim):
        step = prod(shape[outer + 1 :])
        # With more than one index here, some run would not begin at a block boundary
        if step % block:
            if sum(stop - start for start, stop in spans[outer]) > 1:
                return False
            offset += spans[outer][0][0] * step
    inner = prod(shape[dim + 1 :])
    total = prod(shape)
    runs = [(offset + low * inner, offset + high * inner) for low, high in spans[dim]]
    return all(begin % block == 0 and (end % block == 0 or end == total) for begin, end in runs)


@dataclass(frozen=True)
class QuantizedPlan:
    """Describe the quantized weights of a model: which parameters they are, and their quantization format."""

    bits: int  # 4 or 8
    kind: str  # ``nf4``, ``fp4`` or ``int8``, or a name of an extension's
    double: bool  # whether the scales of 4-bit blocks are quantized too
    weights: tuple[str, ...]  # names of the parameters
    # names of ``weights`` that are stored as ``[in, out]`` and quantized as ``[out, in]``
    transposed: frozenset[str] = frozenset()
    # whether the checkpoint's weights are quantized; their scales then stay in float32
    stored: bool = False
    # whether bitsandbytes' modules hold the weights, which PEFT and inference engines support
    by_bitsandbytes = True

    @property
    def bytes_per_value(self) -> float:
        """Return the mean bytes per weight that data ranks gather, with a scale for each 4-bit block."""
        return 0.5 + 4 / BLOCK if self.bits == 4 else 1.0

    @property
    def described(self) -> str:
        """The quantization format in words: ``in 4 bits``, for example."""
        return f"in {self.bits} bits"

    def lines(self, by_name: Mapping[str, ParameterPlan]) -> list[str]:
        """Return lines for the printed plan about the quantized weights: their format, and why results on shards may
        differ from those in one process. ``by_name`` maps names to the plans of all parameters.
        """
        weights = [by_name[name] for name in self.weights]
        lines = [f"quantized: {len(weights)} weights in {self.bits} bits ({self.kind})"]
        cut_through = sum(not self.aligned(planned) for planned in weights)
        if cut_through and self.stored:
            lines.append(
                f"4-bit blocks of {cut_through} weights do not align with their shards: they cannot be loaded"
            )
        elif cut_through:
            unit = "4-bit blocks" if self.bits == 4 else "8-bit rows"
            lines.append(
                f"{unit} of {cut_through} weights do not align with their shards: close to unsharded, not equal"
            )
        if self.double and any(planned.cuts for planned in weights):
            lines.append(
                "double quantization takes blocks and a mean over the scales of a shard: close to unsharded, not equal"
            )
        return lines

    def bytes_of(self, name: str, local: Sequence[int], sharded: bool) -> int:
        """Return the bytes of a rank's shard of the weight ``name``, scales included; ``local`` is the shape of the
        shard. With ``sharded`` (the weight is sharded over data ranks), every 4-bit matrix takes whole blocks of 64
        values.
        """
        matrices = prod(local[:-2])
        values = prod(local[-2:])
        if self.bits == 8:
            return values + 4 * local[-1 if name in self.transposed else -2]
        blocks = ceil(values / BLOCK)
        if sharded or len(local) == 3:
            return matrices * (blocks * BLOCK // 2 + bytes_of_scales(blocks, self.double))
        # scales, their scales, their mean, a table
        outer = blocks + 4 * ceil(blocks / OUTER_BLOCK) + 4 + _OUTER_CODE
        return ceil(values / 2) + (outer if self.double else 4 * blocks) + _CODE

    def aligned(self, planned: ParameterPlan) -> bool:
        """Return whether the shards of a weight, each quantized on its own rank, hold the same values as the weight
        quantized in one process. Differences due to double quantization are not considered.
        """
        return matrix_blocks_align(
            planned.shape, planned.cuts, self.bits, planned.name in self.transposed
        )


@cache
def matrix_blocks_align(
    shape: tuple[int, ...],
    cuts: tuple[Cut, ...],
    bits: int = 4,
    transposed: bool = False,
) -> bool:
    """Return whether every quantization block of each rank's shard is also a block of the full matrix. A block has 64
    consecutive values in 4 bits, and is a full row in 8 bits.

    Args:
        shape: ``[rows, columns]`` of the full matrix, or ``[matrices, rows, columns]`` of experts, whose matrices are
            quantized one by one.
        cuts: how the weight is sharded, one entry per mesh axis.
        bits: 4 or 8.
        transposed: the matrix is quantized as ``[columns, rows]``.
    """
    *_, rows, columns = range(len(shape))
    if transposed:
        rows, columns = columns, rows
    matrix = shape[rows], shape[columns]
    for ranks in coordinates(cuts):
        spans = share_spans(shape, cuts, ranks)
        down = spans[rows]
        across = spans[columns]
        if bits == 8 and down and across and across != [(0, matrix[1])]:
            return False
        if bits == 4 and not runs_align(matrix, [down, across], BLOCK):
            return False
    return True


def bytes_of_scales(blocks: int, double: bool) -> int:
    """Return the bytes of the scales of a 4-bit matrix of ``blocks`` blocks, a multiple of 4.

    Without double quantization, every block has a scale of 4 bytes. With ``double``, every block has a scale of one
    byte, every 256 scales share a further scale of 4 bytes, and the mean of the scales takes 4 bytes.
    """
    return 4 * (ceil(blocks / OUTER_BLOCK) + 1 + ceil(blocks / 4)) if double else 4 * blocks
