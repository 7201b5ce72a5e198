"""Share work of unequal cost out evenly: numbers in, numbers out."""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def share_by_cost(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Return the items of each bin, so that the fullest bin costs little: the most expensive first, each into the bin
    that costs least so far, at most 4/3 of the best (LPT, Graham 1969). Equal input gives equal output on all ranks;
    bins with the most expensive items come first, and none is empty if there are as many items with a cost above 0.
    """
    loads = [(0.0, index) for index in range(bins)]
    heapify(loads)
    shares: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, index = loads[0]
        shares[index].append(item)
        heapreplace(loads, (load + costs[item], index))
    return shares
