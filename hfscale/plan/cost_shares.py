"""Distribute items of unequal cost evenly over bins: pure arithmetic."""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def share_by_cost(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Return the items of each bin, such that the cost of the fullest bin is at most 4/3 of the optimum.

    Items are assigned in order of descending cost, each to the bin with the lowest cost so far (LPT, Graham 1969). The
    result is deterministic, hence equal on all ranks. Bins with the most expensive items come first. No bin is empty if
    at least ``bins`` items have a cost above 0.
    """
    loads = [(0.0, index) for index in range(bins)]
    heapify(loads)
    shares: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, index = loads[0]
        shares[index].append(item)
        heapreplace(loads, (load + costs[item], index))
    return shares
