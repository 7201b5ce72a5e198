"""Assign the tokens of a batch's sequences to ranks: pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

Interval = tuple[int, int]  # tokens from the first to before the second


@dataclass(frozen=True)
class Split:
    """Assign ``total`` tokens to ``size`` ranks, in a zigzag: rank ``r`` has pieces ``r`` and ``2n-1-r`` of ``2n``.

    ::

        rank 0: [0  1] . . . . . . [14 15]     a later query reads more keys: with an early and a late piece each, all
        rank 1: . . [2  3] . . [12 13] . .     ranks have the same work under a causal mask (Llama Team 2024; striped
        ...                                    attention, Brandon et al. 2023, has the same end)

    Nothing is padded: lengths differ by two tokens at most, and a piece may be empty.
    """

    total: int
    size: int
    together: int = 1  # how many consecutive ones of those ranks count as one here, which has the tokens of all of them

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        count = 2 * self.size * self.together
        return tuple(
            accumulate(
                (self.total // count + (i < self.total % count) for i in range(count)), initial=0
            )
        )

    def pieces(self, rank: int) -> tuple[Interval, ...]:
        """Return the intervals of ``rank``, in order."""
        if self.size == 1:
            return ((0, self.total),)
        ends = self._ends
        last = 2 * self.size * self.together - 1
        members = range(rank * self.together, (rank + 1) * self.together)
        intervals = ((ends[i], ends[i + 1]) for member in members for i in (member, last - member))
        return tuple(sorted(intervals))

    def length(self, rank: int) -> int:
        """Return how many tokens ``rank`` has."""
        return sum(stop - start for start, stop in self.pieces(rank))

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of every rank."""
        return [self.length(rank) for rank in range(self.size)]

    # Indices are made on the device where they are used, since a copy from the host would wait for it; those that every
    # layer asks for are made once.

    @cached_property
    def _orders(self) -> dict[torch.device | None, tuple[Tensor, Tensor]]:
        return {}

    def places(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of the tokens of ``rank``: ``[length(rank)]``, ascending."""
        return torch.cat(
            [torch.arange(start, stop, device=device) for start, stop in self.pieces(rank)]
        )

    def side_by_side(self, device: torch.device | None = None) -> Tensor:
        """Return the positions of all ranks' tokens, rank 0's first: ``[total]``."""
        return self._both(device)[0]

    def order(self, device: torch.device | None = None) -> Tensor:
        """Return the index of each token of the sequence in :meth:`side_by_side`: ``[total]``."""
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
        """Return, for each rank that counts as part of ``rank``, the indices of its tokens among those of ``rank``."""
        alone = Split(self.total, self.size * self.together)
        own = self.places(rank, device)
        members = range(rank * self.together, (rank + 1) * self.together)
        return [torch.searchsorted(own, alone.places(member, device)) for member in members]


def heads_fit(heads: int, key_heads: int, size: int) -> bool:
    """Return whether heads split evenly over ``size`` ranks, and key heads evenly or as equal groups of ranks."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def choose(method: str, heads: int, key_heads: int, size: int) -> str:
    """Return the method of context parallelism for one call: ``method``, or the cheaper one for ``auto``. Per rank and
    layer, forward and backward, with ``Q`` and ``K`` entries of all queries and of all keys, gathering sends
    ``6 K (n-1)/n`` and heads ``4 (Q + K) (n-1)/n^2``: less from ``n > 2/3 (Q/K + 1)`` on.
    """
    if method != "auto":
        return method
    fewer = size > 2 / 3 * (heads / key_heads + 1)
    return "heads" if fewer and heads_fit(heads, key_heads, size) else "gather"


def tokens_of(batch: Mapping[str, Any], first: Sequence[str] = ()) -> tuple[int, int]:
    """Return the number of samples, and of tokens per sample, in the ``first`` inputs or else in token ids or
    embeddings; refuse batches without these.
    """
    for name in (*first, "input_ids", "inputs_embeds"):
        tokens = batch.get(name)
        if isinstance(tokens, Tensor) and tokens.ndim > 1:
            return tokens.shape[0], tokens.shape[1]
    raise ConfigError(
        f"a batch must have input_ids or inputs_embeds, by whose shape it is cut, and has only {', '.join(batch)}"
    )
