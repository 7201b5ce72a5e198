"""Compute the bandwidth between ranks: within a node by its links, between nodes by each rank's share of the network.

``bus`` is the bandwidth of a collective in the sense of nccl-tests: a rank sends ``(n-1)/n`` of the bytes of a gather
or a scatter, and twice that in an all-reduce. Between nodes ``1/bus = 1/link + 1/(local ranks x nic)``, as each local
rank has a network card of its own.
"""

from math import log2

from .machines_known import Constants, Machine


def tensor_bus(size: int, machine: Machine, constants: Constants) -> float:
    """Return the bytes per second of a collective in a layer over ``size`` neighbouring ranks."""
    within = constants.link * machine.link_bandwidth
    local = min(size, machine.ranks_per_node)
    return within if size <= local else 1 / (1 / within + 1 / (local * constants.far_nic * machine.nic_bandwidth))


def data_bus(size: int, apart: int, machine: Machine, constants: Constants) -> float:
    """Return the bytes per second of a collective of weights over ``size`` ranks, ``apart`` ranks from each other."""
    within = constants.data_link * machine.link_bandwidth
    local = max(1, min(size, machine.ranks_per_node // min(apart, machine.ranks_per_node)))
    nodes = size / local
    if nodes <= 1:
        return within
    single = 1 / (1 / within + 1 / (local * constants.nic * machine.nic_bandwidth))
    return single / (1 + constants.spread * log2(nodes))


def ring_share(collective: str, size: int) -> float:
    """Return the bytes that a rank sends per byte that it passes to a ring collective over ``size`` ranks.

    Args:
        collective: ``allreduce``, ``allgather`` (given this rank's piece), ``reduce_scatter``, ``alltoall``; ``recv``
            sends nothing, and anything else what it is given.
    """
    shares = {"allreduce": 2 * sent(size), "allgather": size - 1.0, "recv": 0.0}
    return {**shares, "reduce_scatter": sent(size), "alltoall": sent(size)}.get(collective, 1.0)


def sent(size: int) -> float:
    """Return the fraction of a gathered tensor that a rank receives from others."""
    return (size - 1) / size
