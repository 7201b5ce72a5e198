"""Share work of unequal cost out evenly: numbers in, numbers out."""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def share_by_cost(costs: Sequence[float], bins: int) -> list[int]:
    """Return the bin of each item, so that the fullest bin costs little: the most expensive first, each into the bin
    that costs least so far, at most 4/3 of the best (LPT, Graham 1969). Equal input gives equal output on all ranks;
    no bin is empty if there are as many items with a cost above 0.
    """
    loads = [(0.0, index) for index in range(bins)]
    heapify(loads)
    found = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, index = loads[0]
        found[item] = index
        heapreplace(loads, (load + costs[item], index))
    return found
