"""Ranks that are forked from this process for one call: nothing is imported anew, and nothing is left behind.

For sweeps over many families, where a rank that hangs or dies of a signal is a verdict, and the next call is not to
know of it. The parent must have run nothing of autograd before; :meth:`ForkedRanks.alone` forks for that.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hfscale.testing.pool import RankError, RankPool

from .children import Ended, Note, await_all, in_a_child, join_group


class RanksFailed(RankError):
    """Not all ranks returned.

    Attributes:
        ended: how each did.
    """

    def __init__(self, ended: list[Ended]) -> None:
        super().__init__("; ".join(end.error for end in ended if end.error))
        self.ended = ended


class ForkedRanks(RankPool):
    """``world`` processes for each call.

    Args:
        world: how many ranks.
        timeout: seconds without an answer, or without computing, after which a call has hung.
    """

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank; returns the results by rank.

        Raises:
            RanksFailed: it raised on a rank, a rank died, or did not return.
        """
        return self._forked(self.world, function, args, kwargs)

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call it in one process that is none of the ranks.

        Raises:
            RanksFailed: it raised, died or did not return.
        """
        return self._forked(1, function, args, {})[0]

    def _forked(
        self,
        world: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="hfscale-ranks-") as name:
            directory = Path(name)

            def rank(index: int) -> Callable[[Note], None]:
                def started(note: Note) -> None:
                    note("")
                    if world > 1:
                        join_group(index, world, directory, self.timeout)
                    torch.save(function(*args, **kwargs), directory / f"{index}.pt")

                return started

            pids = {
                f"rank{index}": in_a_child(rank(index), directory, f"rank{index}")
                for index in range(world)
            }
            ended = await_all(pids, directory, self.timeout)
            if any(end.error for end in ended.values()):
                raise RanksFailed(list(ended.values()))
            return [
                torch.load(directory / f"{index}.pt", weights_only=False) for index in range(world)
            ]
