"""Compute the bytes that a rank sends over each axis, from the shapes of model and step.

Collectives run as rings. With ``n`` ranks, a gather or a scatter sends ``(n-1)/n`` of the whole tensor, an all-reduce
twice as much. ``x`` are the bytes of a microbatch's hidden states, ``w`` those of a rank's weights before data
sharding::

    tp             8 x (n-1)/n per layer: two blocks, each with a gather and a scatter (or an all-reduce) in
                   both directions; 10 if inputs are gathered again for the weights' gradients; 3 more (2 with
                   all-reduces) if the layer is recomputed: its forward pass without the last scatter; 2 at the
                   embedding and 2 at the head. If a mixture's experts are whole, half of the layer's bytes, for
                   attention: each rank sends its shard of the tokens, and tokens are gathered before and after the
                   mixture (2 more) unless the sequence is sharded anyway; or the usual 4, if sums are fewer bytes
                   than routes. Once per step 2 (n-1)/n of the partial gradients: of adapters' weights, of routers
    ep             4 x (n-1)/n per expert that a token is sent to: dispatch, combine, and their gradients; 2 more
                   if the layer is recomputed
    cp             3 (n-1)/n of all keys and values: gathered in both passes, gradients scattered; if heads are
                   exchanged, 4 (n-1)/n of this rank's queries, results, keys and values, half of it forward;
                   the forward part again if the layer is recomputed
    pp             x forward and its gradient backward, sharded over the tensor-parallel ranks if the sequence is
    dp_shard       (n-1)/n w once, to reduce gradients; weights are gathered once, or (without stages) in both
                   passes of each microbatch, weights around the layers in one pass; experts that are spread over n
                   of these ranks have only 1/n of the ranks to shard over
    dp_replicate   2 (n-1)/n of the shards' gradients

The bandwidth of a collective is the bus bandwidth of nccl-tests (``bus``). Within a node it is the links' bandwidth.
Between nodes, ``1/bus = 1/link + 1/(local ranks x nic)``, because each local rank has its own network card.
"""

from dataclasses import dataclass, replace
from math import log2

from .job import Job, Place
from .machines_known import Constants, Machine
from .model_shape import ModelShape


@dataclass(frozen=True)
class Traffic:
    """Hold the bytes that a rank sends over each axis."""

    tp: float = 0.0
    ep: float = 0.0
    cp: float = 0.0
    pp: float = 0.0
    dp_shard: float = 0.0
    dp_replicate: float = 0.0


def stream_bytes(shape: ModelShape, job: Job) -> float:
    """Return the bytes of a microbatch's hidden states, summed over all tensor-parallel ranks."""
    return job.value_bytes * job.tokens * shape.hidden


def layer_traffic(shape: ModelShape, job: Job) -> Traffic:
    """Return the bytes that one layer exchanges per microbatch, forward and backward."""
    layout = job.layout
    stream = stream_bytes(shape, job)
    experts = 0.0
    if layout.ep > 1 and shape.experts and not sums_experts(shape, job):
        times = (4 + 2 * job.recompute) * shape.routed / (layout.tp if layout.slices_tokens else 1)
        experts = times * sent(layout.ep) * stream
    # In units of one gather or one scatter.
    often = job.exchanged / 2 + 2 * job.recompute + 2 * (not job.sequence_parallel)
    if not (shape.experts and layout.slices_tokens) or sums_experts(shape, job):
        often = job.exchanged + (3 if job.sequence_parallel else 2) * job.recompute
    # Each context-parallel rank sends everything that is exchanged except its own shard.
    own = job.value_bytes * job.tokens / layout.tp
    exchanged = (3 + job.recompute) * 2 * own * layout.cp * shape.keys
    if job.exchange.moves_heads:
        heads = shape.queries + job.exchange.replicas * shape.keys
        exchanged = (4 + 2 * job.recompute) * own * heads
    return Traffic(
        tp=often * sent(layout.tp) * stream,
        ep=experts,
        cp=sent(layout.cp) * exchanged,
    )


def sums_experts(shape: ModelShape, job: Job) -> bool:
    """Return whether all-reducing the experts' outputs over tensor-parallel ranks takes fewer bytes than sending
    routes.
    """
    layout = job.layout
    alone = layout.slices_tokens and not job.sequence_parallel and layout.expert_batches == 1
    return alone and 2 * shape.routed >= layout.tp


def edge_traffic(shape: ModelShape, job: Job) -> float:
    """Return the bytes per microbatch that a tensor-parallel rank sends for the embedding, or for the head."""
    return 2 * sent(job.layout.tp) * stream_bytes(shape, job)


def data_traffic(layers: float, tables: float, experts: float, job: Job) -> Traffic:
    """Return the bytes that a data-parallel rank sends per step, given its matrix entries before data sharding."""
    layout = job.layout
    sharded = 0.0
    replicated = 0.0
    dense = layers, tables, layout.dp_shard, layout.dp_replicate
    spread = experts, 0.0, layout.size("edp_shard"), layout.size("edp_replicate")
    for inside, around, shards, replicas in (dense, spread):
        gradients = job.trained * job.gradient_bytes * (inside + around)
        gathered = job.microbatches * (2 * inside + around) if job.gathers else inside + around
        if gradients + inside:
            sharded += sent(shards) * (gradients + job.gathered_bytes * gathered)
        replicated += 2 * sent(replicas) * gradients / shards
    return Traffic(dp_shard=sharded, dp_replicate=replicated)


def rank_traffic(shape: ModelShape, job: Job, place: Place) -> Traffic:
    """Return the bytes that one rank sends in a step."""
    layer = layer_traffic(shape, job)
    layers = place.layers
    count = job.microbatches
    edges = count * place.ends * edge_traffic(shape, job) + 2 * sent(job.layout.tp) * place.partial
    handed = stream_bytes(shape, job) / (job.layout.tp if job.sequence_parallel else 1)
    entries = place.layer_weights, place.table_weights, place.expert_weights
    return replace(
        data_traffic(*entries, replace(job, trained=place.trained)),
        tp=layer.tp * layers * count + edges,
        ep=layer.ep * layers * count,
        cp=layer.cp * layers * count,
        pp=count * (place.forward + place.backward) * handed,
    )


def tensor_bus(size: int, machine: Machine, constants: Constants) -> float:
    """Return the bandwidth, in bytes per second, of a layer's collective over ``size`` neighbouring ranks."""
    within = constants.link * machine.link_bandwidth
    local = min(size, machine.ranks_per_node)
    return (
        within
        if size <= local
        else 1 / (1 / within + 1 / (local * constants.far_nic * machine.nic_bandwidth))
    )


def data_bus(size: int, apart: int, machine: Machine, constants: Constants) -> float:
    """Return the bandwidth, in bytes per second, of a collective of weights over ``size`` ranks with distance
    ``apart``.
    """
    within = constants.data_link * machine.link_bandwidth
    local = max(1, min(size, machine.ranks_per_node // min(apart, machine.ranks_per_node)))
    nodes = size / local
    if nodes <= 1:
        return within
    single = 1 / (1 / within + 1 / (local * constants.nic * machine.nic_bandwidth))
    return single / (1 + constants.spread * log2(nodes))


def ring_share(collective: str, size: int) -> float:
    """Return the bytes that a rank sends per byte that it passes to a ring collective over ``size`` ranks.

    The collective is ``allreduce``, ``allgather`` (given this rank's shard), ``reduce_scatter`` or ``alltoall``.
    ``recv`` sends nothing, and any other collective sends the bytes that it is given.
    """
    shares = {"allreduce": 2 * sent(size), "allgather": size - 1.0, "recv": 0.0}
    return {**shares, "reduce_scatter": sent(size), "alltoall": sent(size)}.get(collective, 1.0)


def sent(size: int) -> float:
    """Return the fraction of a gathered tensor that a rank receives from other ranks."""
    return (size - 1) / size
