"""Compute the bytes that a rank sends in a step over each parallel axis, from the sizes of the model and the batch.

Collectives run as rings. With ``n`` ranks on the axis, an all-gather or a reduce-scatter sends ``(n-1)/n`` of the full
tensor, an all-reduce twice as much. ``x`` are the bytes of a microbatch's hidden states, ``w`` those of a rank's
weights before they are sharded over data ranks::

    tp             8 x (n-1)/n per layer: attention and MLP each have a gather and a scatter (or an all-reduce) in
                   both passes. 10 instead of 8 if the backward pass gathers inputs again. 3 more (2 with all-reduces)
                   if the layer is recomputed: its second forward pass needs no last scatter. In addition 2 at the
                   embedding, and 2 at the head. In MoE layers with whole experts, each rank sends its shard of the
                   tokens to the experts: 4 for attention, and 2 to gather tokens before and after the experts, unless
                   the sequence is sharded anyway; or 8 as above, if all-reducing the experts' outputs takes fewer
                   bytes than sending tokens. Once per step 2 (n-1)/n of partial gradients: of adapters, of routers
    ep             4 x (n-1)/n per expert that a token is sent to: dispatch, combine, and their gradients; 2 more
                   if the layer is recomputed
    cp             3 (n-1)/n of all keys and values: gathered in both passes, gradients scattered; if heads are
                   exchanged, 4 (n-1)/n of this rank's queries, results, keys and values, half of it forward;
                   the forward part again if the layer is recomputed
    pp             x forward and its gradient backward, sharded over the tensor-parallel ranks if the sequence is
    dp_shard       (n-1)/n w once, to reduce gradients; weights are gathered once, or (without stages) in both
                   passes of each microbatch, embedding and head in one pass; experts that are distributed over n of
                   these ranks are sharded over only 1/n of them
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
    """Hold the bytes that a rank sends over each parallel axis."""

    tp: float = 0.0
    ep: float = 0.0
    cp: float = 0.0
    pp: float = 0.0
    dp_shard: float = 0.0
    dp_replicate: float = 0.0


def stream_bytes(shape: ModelShape, job: Job) -> float:
    """Return the bytes of the hidden states of one microbatch, all tensor-parallel ranks together."""
    return job.value_bytes * job.tokens * shape.hidden


def layer_traffic(shape: ModelShape, job: Job) -> Traffic:
    """Return the bytes that a rank sends for one layer and one microbatch, forward and backward, by parallel axis."""
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
    """Return whether tensor-parallel ranks all-reduce the experts' outputs instead of sending each token to its
    experts, because this takes fewer bytes.
    """
    layout = job.layout
    alone = layout.slices_tokens and not job.sequence_parallel and layout.expert_batches == 1
    return alone and 2 * shape.routed >= layout.tp


def edge_traffic(shape: ModelShape, job: Job) -> float:
    """Return the bytes that a tensor-parallel rank sends per microbatch for the embedding, or for the head, forward and
    backward.
    """
    return 2 * sent(job.layout.tp) * stream_bytes(shape, job)


def data_traffic(layers: float, tables: float, experts: float, job: Job) -> Traffic:
    """Return the bytes that a data-parallel rank sends per step for gradients and weights. ``layers``, ``tables``
    (embedding and head) and ``experts`` are numbers of weights before they are sharded over data ranks.
    """
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
    """Return the bytes that one pipeline rank's process sends in a step, by parallel axis; ``place`` describes its
    layers and weights.
    """
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
    """Return the bandwidth, in bytes per second, that a collective of a layer's activations reaches over ``size``
    neighboring ranks.
    """
    within = constants.link * machine.link_bandwidth
    local = min(size, machine.ranks_per_node)
    return (
        within
        if size <= local
        else 1 / (1 / within + 1 / (local * constants.far_nic * machine.nic_bandwidth))
    )


def data_bus(size: int, apart: int, machine: Machine, constants: Constants) -> float:
    """Return the bandwidth, in bytes per second, that a collective of gradients or weights reaches over ``size`` ranks;
    ``apart`` is the difference of successive rank numbers, which tells how many of them share a node.
    """
    within = constants.data_link * machine.link_bandwidth
    local = max(1, min(size, machine.ranks_per_node // min(apart, machine.ranks_per_node)))
    nodes = size / local
    if nodes <= 1:
        return within
    single = 1 / (1 / within + 1 / (local * constants.nic * machine.nic_bandwidth))
    return single / (1 + constants.spread * log2(nodes))


def ring_share(collective: str, size: int) -> float:
    """Return how many bytes a rank sends in a ring collective over ``size`` ranks, divided by the bytes of the tensor
    that it passes to the collective.

    The collective is ``allreduce``, ``allgather`` (given this rank's shard), ``reduce_scatter`` or ``alltoall``.
    ``recv`` sends nothing, and any other collective sends as many bytes as it is given.
    """
    shares = {"allreduce": 2 * sent(size), "allgather": size - 1.0, "recv": 0.0}
    return {**shares, "reduce_scatter": sent(size), "alltoall": sent(size)}.get(collective, 1.0)


def sent(size: int) -> float:
    """Return the fraction of a full tensor that a rank sends in an all-gather or a reduce-scatter over ``size``
    ranks.
    """
    return (size - 1) / size
