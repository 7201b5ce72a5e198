"""Evaluate transformers' attention mask in blocks, as a function of positions in the full sequence.

A stock model describes its mask by a function of four indices (sample, head, query, key) and evaluates it for the
tokens it was given. Here the function is kept, and evaluated where a kernel needs a block. Between two intervals of
tokens the mask is skipped, full, causal or something else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..._compat.transformers.attention import and_masks, causal_mask_function, keep_documents_apart, leave_out_padding
from ..._compat.transformers.computing import text_positions
from ...plan.sequence_split import Interval, Split
from .cut_batch import CutBatch

SKIPPED, FULL, CAUSAL, MASKED = "skipped", "full", "causal", "masked"
_NO_IDLE = 0  # among other views of a mask, which are known by how many ranks they take together
_ROWS = 1024  # of a block, looked at at once


@dataclass
class MaskBlocks:
    """Hold the mask of one forward pass."""

    batch: CutBatch
    # transformers' mask function of full-sequence positions: (sample, head, query, key) -> whether it attends
    function: Callable[..., Tensor]
    samples: int
    device: torch.device
    attend: Callable[..., Any]  # computes the attention of calls with this mask: ``(module, q, k, v, mask, call)``
    # ``[b, s]``: queries without any key, which read all keys alike; ``None`` where such queries read nothing
    idle: Tensor | None = None
    _kinds: dict[tuple[Interval, Interval], str] = field(default_factory=dict)
    _others: dict[int, "MaskBlocks"] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        batch: CutBatch,
        function: Callable[..., Tensor],
        samples: int,
        device: torch.device,
        attend: Callable[..., Any],
    ) -> "MaskBlocks":
        """Return the mask of transformers' ``function``, without padding and separate for each document."""
        if batch.documents is not None:
            positions = text_positions(batch.whole_positions(device))
            assert positions is not None  # in which the documents were found
            positions = positions.expand(samples, -1)
            function = keep_documents_apart(function, positions, batch.documents)
        if batch.padding is not None:
            function = and_masks(function, leave_out_padding(batch.padding))
        return cls(batch, function, samples, device, attend)

    def filled(self) -> "MaskBlocks":
        """Return this mask with ``idle`` set: queries without any key (left padding) then read all keys alike."""
        total = self.batch.split.total
        chunks = [(start, min(start + _ROWS, total)) for start in range(0, total, _ROWS)]
        idle = torch.cat([~self.block(rows, (0, total)).any(-1).squeeze(1) for rows in chunks], -1)
        return replace(self, idle=idle, _kinds={}, _others={}) if bool(idle.any()) else self

    def without_idle(self) -> "MaskBlocks":
        """Return this mask with idle queries reading nothing."""
        if self.idle is None:
            return self
        if _NO_IDLE not in self._others:  # every layer asks
            self._others[_NO_IDLE] = replace(self, idle=None, _kinds={}, _others={})
        return self._others[_NO_IDLE]

    def of_one_rank(self, attend: Callable[..., Any]) -> "MaskBlocks":
        """Return this mask for a rank that has all tokens, with attention computed by ``attend``."""
        return replace(self.of_groups(self.batch.split.size), attend=attend)

    def of_groups(self, size: int) -> "MaskBlocks":
        """Return this mask for groups of ``size`` ranks, each group holding its tokens together."""
        if size not in self._others:
            split = Split(self.batch.split.total, self.batch.split.size // size, size)
            batch = replace(self.batch, split=split, rank=self.batch.rank // size)
            self._others[size] = replace(self, batch=batch, _others={})
        return self._others[size]

    def is_plain(self) -> bool:
        """Return whether this is the plain causal mask."""
        return self.function is causal_mask_function

    def kind(self, rows: Interval, columns: Interval) -> str:
        """Return how queries in ``rows`` read keys in ``columns``: skipped, full, causal or masked."""
        if rows[0] == rows[1] or columns[0] == columns[1]:
            return SKIPPED
        if self.is_plain():
            if rows == columns:
                return CAUSAL
            return SKIPPED if columns[0] >= rows[1] else FULL if columns[1] <= rows[0] + 1 else MASKED
        if (rows, columns) not in self._kinds:
            self._kinds[rows, columns] = self._look(rows, columns)
        return self._kinds[rows, columns]

    def _look(self, rows: Interval, columns: Interval) -> str:
        some, every, triangle = False, True, rows == columns
        for start in range(rows[0], rows[1], _ROWS):
            stop = min(start + _ROWS, rows[1])
            found = self.block((start, stop), columns)
            flags = [found.any(), found.all()]
            if triangle:  # a window or a document that is no shorter than the interval hides nothing else
                below = torch.ones_like(found[0, 0]).tril(start - columns[0])
                flags.append((found == below).all())
            here, all_here, *same = torch.stack(flags).tolist()
            some, every, triangle = some or here, every and all_here, triangle and all(same)
            if some and not every and not triangle:
                return MASKED
        return FULL if every else CAUSAL if triangle else SKIPPED

    def block(self, rows: Interval, columns: Interval) -> Tensor:
        """Return ``[b, 1, rows, columns]``, True where a query attends to a key."""

        def indices(start: int, stop: int, dim: int) -> Tensor:
            shape: list[Any] = [1, 1, 1, 1]
            shape[dim] = -1
            return torch.arange(start, stop, device=self.device).view(shape)

        found = self.function(indices(0, self.samples, 0), indices(0, 1, 1), indices(*rows, 2), indices(*columns, 3))
        if self.idle is not None:
            found = found | self.idle[:, None, slice(*rows), None]
        return found.expand(self.samples, 1, rows[1] - rows[0], columns[1] - columns[0])

    def bias(self, rows: Interval, columns: Interval, dtype: torch.dtype) -> Tensor:
        """Return the mask of a block as a bias to add to scores: 0 or minus infinity."""
        found = self.block(rows, columns)
        return torch.zeros((), dtype=dtype, device=found.device).masked_fill(~found, float("-inf"))
