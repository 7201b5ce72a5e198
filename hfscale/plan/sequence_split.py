"""Compute which tokens of a batch's sequences each context rank processes; only indices, no communication."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

Interval = tuple[int, int]  # positions ``start`` to ``stop - 1`` of tokens


@dataclass(frozen=True)
class Split:
    """Assign ``total`` tokens to ``size`` ranks in a zigzag: the sequence is divided into ``2 size`` intervals, and
    rank ``r`` has intervals ``r`` and ``2 size - 1 - r``.

    ::

        rank 0: [0  1] . . . . . . [14 15]     A later query reads more keys. With an early and a late interval, all
        rank 1: . . [2  3] . . [12 13] . .     ranks have the same work under a causal mask (Llama Team 2024; striped
        ...                                    attention, Brandon et al. 2023, has the same purpose).

    Nothing is padded: the ranks' numbers of tokens differ by two at most, and an interval may be empty.
    """

    total: int
    size: int
    # number of context ranks that this split treats as one rank, which has the tokens of the whole group
    together: int = 1

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        count = 2 * self.size * self.together
        return tuple(
            accumulate(
                (self.total // count + (i < self.total % count) for i in range(count)), initial=0
            )
        )

    def pieces(self, rank: int) -> tuple[Interval, ...]:
        """Return the intervals ``(start, stop)`` of token positions that ``rank`` holds, in ascending order."""
        if self.size == 1:
            return ((0, self.total),)
        ends = self._ends
        last = 2 * self.size * self.together - 1
        members = range(rank * self.together, (rank + 1) * self.together)
        intervals = ((ends[i], ends[i + 1]) for member in members for i in (member, last - member))
        return tuple(sorted(intervals))

    def length(self, rank: int) -> int:
        """Return the number of tokens that ``rank`` holds."""
        return sum(stop - start for start, stop in self.pieces(rank))

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens that each rank holds, by rank."""
        return [self.length(rank) for rank in range(self.size)]

    # Indices are computed on the device on which they are used, since a copy from the host would wait for the device.
    # Indices that every layer needs are cached.

    @cached_property
    def _orders(self) -> dict[torch.device | None, tuple[Tensor, Tensor]]:
        return {}

    def places(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Return the positions in the sequence of the tokens that ``rank`` holds: ``[length(rank)]``, ascending."""
        return torch.cat(
            [torch.arange(start, stop, device=device) for start, stop in self.pieces(rank)]
        )

    def side_by_side(self, device: torch.device | None = None) -> Tensor:
        """Return the positions in the sequence of all tokens, concatenated in the order of ranks: ``[total]``."""
        return self._both(device)[0]

    def order(self, device: torch.device | None = None) -> Tensor:
        """Return the permutation that sorts tokens concatenated in the order of ranks by their positions in the
        sequence: ``[total]``, the inverse of :meth:`side_by_side`.
        """
        return self._both(device)[1]

    def _both(self, device: torch.device | None) -> tuple[Tensor, Tensor]:
        if device not in self._orders:
            places = torch.cat([self.places(rank, device) for rank in range(self.size)])
            order = torch.empty_like(places).scatter_(
                0, places, torch.arange(self.total, device=device)
            )
            self._orders[device] = places, order
        return self._orders[device]

    def members(self, rank: int, device: torch.device | None = None) -> list[Tensor]:
        """Return where each context rank's tokens are among the tokens of its group, one index tensor per context rank.

        ``rank`` is a group of ``together`` context ranks, which this split treats as one rank.
        """
        alone = Split(self.total, self.size * self.together)
        own = self.places(rank, device)
        members = range(rank * self.together, (rank + 1) * self.together)
        return [torch.searchsorted(own, alone.places(member, device)) for member in members]


def heads_fit(heads: int, key_heads: int, size: int) -> bool:
    """Return whether attention heads can be sharded over ``size`` ranks: whether ``size`` divides the number of query
    heads, and divides or is a multiple of the number of key heads.
    """
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def choose(method: str, heads: int, key_heads: int, size: int) -> str:
    """Return the method of context parallelism for an attention call: ``method`` itself, or for ``"auto"`` the one that
    sends fewer entries: ``"gather"`` (all-gather keys and values) or ``"heads"`` (all-to-all between sharded sequences
    and sharded heads, DeepSpeed-Ulysses).

    Let ``Q`` and ``K`` be the numbers of entries of all queries and of all keys, and ``n`` the number of ranks. Per
    rank and layer, forward and backward, ``"gather"`` sends ``6 K (n-1)/n`` entries, and ``"heads"`` sends ``4 (Q + K)
    (n-1)/n^2``, which is less if ``n > 2/3 (Q/K + 1)``.
    """
    if method != "auto":
        return method
    fewer = size > 2 / 3 * (heads / key_heads + 1)
    return "heads" if fewer and heads_fit(heads, key_heads, size) else "gather"


def tokens_of(batch: Mapping[str, Any], first: Sequence[str] = ()) -> tuple[int, int]:
    """Return the number of samples in a batch and the number of tokens per sample. They are the first two dims of the
    batch's input: of the first argument in ``first`` that it has, or else of ``input_ids`` or ``inputs_embeds``.

    Raises:
        ConfigError: the batch has none of these inputs.
    """
    for name in (*first, "input_ids", "inputs_embeds"):
        tokens = batch.get(name)
        if isinstance(tokens, Tensor) and tokens.ndim > 1:
            return tokens.shape[0], tokens.shape[1]
    raise ConfigError(
        "a batch must have input_ids or inputs_embeds, whose shape gives its numbers of rows and tokens, got only "
        f"{', '.join(batch)}: add input_ids or inputs_embeds"
    )
