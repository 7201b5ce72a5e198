"""Share work of unequal cost out evenly: numbers in, numbers out. Equal input gives equal output on all ranks."""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace


def share_by_cost(costs: Sequence[float], bins: int, most: int | None = None) -> list[list[int]]:
    """Return the items of each bin, so that the fullest bin costs little: the most expensive first, each into the bin
    that costs least so far, at most 4/3 of the best (LPT, Graham 1969), of those with fewer than ``most`` items. Bins
    with expensive items come first; none is empty if there are as many items with a cost above 0.
    """
    loads = [(0.0, index) for index in range(bins)]
    heapify(loads)
    found: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, index = loads[0]
        found[index].append(item)
        if len(found[index]) == most:
            heappop(loads)
        else:
            heapreplace(loads, (load + costs[item], index))
    return found


def dealt_to_ranks(bins: Sequence[list[int]], ranks: int) -> list[list[list[int]]]:
    """Return the bins of each rank, a round after the other and every second one backwards, so that those that ranks
    have at the same time follow each other in ``bins``.
    """
    rounds = [bins[start : start + ranks] for start in range(0, len(bins), ranks)]
    return [[each[rank if index % 2 == 0 else -1 - rank] for index, each in enumerate(rounds)] for rank in range(ranks)]
