"""Bytes that a rank sends to the others of an axis, from the shape of a model and what a step is asked to do.

Collectives run as rings: with ``n`` ranks, ``(n-1)/n`` of a gather's or a scatter's whole tensor, twice that for an
all-reduce. With ``x`` the bytes of a microbatch's stream and ``w`` those of a rank's weights, were they not sharded::

    tp             8 x (n-1)/n for each layer: two blocks, a gather and a scatter (or an all-reduce) both ways;
                   10 where inputs are gathered again for the weights' gradients; of a layer that is recomputed all
                   of its forward pass but the last scatter besides: 3, or the 2 of one all-reduce;
                   2 at the embedding and 2 at the head. Of a mixture whose experts are whole, half of that, for
                   attention: each rank sends a share of the tokens, which is gathered again behind it and before it
                   (2 more) unless the sequence is cut anyway; or 4 as ever where sums are fewer bytes than routes.
                   Once in a step 2 (n-1)/n of the gradients that are partial: of adapters' factors, of routers
    ep             4 x (n-1)/n for each expert that a token is sent to: there and back, and their gradients; 2 more
                   where the layer is recomputed
    cp             3 (n-1)/n of all keys and values: gathered in both passes, and their gradients scattered
    pp             x forward and its gradient backward, cut over the tensor ranks where the sequence is
    dp_shard       (n-1)/n w once, to reduce gradients; weights are gathered once, or, without stages, in both passes of
                   every microbatch, those around the layers in one; experts that are spread over n of these ranks
                   have a n-th of them for themselves
    dp_replicate   2 (n-1)/n of the shards' gradients
"""

from dataclasses import replace

from .job import Job, Place
from .links import sent
from .model_shape import ModelShape


def stream_bytes(shape: ModelShape, job: Job) -> float:
    """Return the bytes of a microbatch's hidden states, over all tensor ranks."""
    return job.value_bytes * job.tokens * shape.hidden


def layer_traffic(shape: ModelShape, job: Job) -> dict[str, float]:
    """Return the bytes that one layer exchanges for a microbatch, by axis, forward and backward."""
    stream, found = stream_bytes(shape, job), dict[str, float]()
    if job.tp > 1:
        found["tp"] = _between_tensor_ranks(shape, job) * sent(job.tp) * stream
    if job.ep > 1 and shape.experts and not sums_experts(shape, job):
        times = (4 + 2 * job.recompute) * shape.routed / (job.tp if job.slices_tokens else 1)
        found["ep"] = times * sent(job.ep) * stream
    if job.cp > 1:
        keys = 2 * job.value_bytes * job.tokens * job.cp * shape.keys / job.tp
        found["cp"] = 3 * sent(job.cp) * keys
    return found


def sums_experts(shape: ModelShape, job: Job) -> bool:
    """Return whether tensor ranks sum their own experts over all tokens, in fewer bytes than routes take."""
    alone = job.slices_tokens and not job.sequence_parallel and job.expert_batches == 1
    return alone and 2 * shape.routed >= job.tp


def _between_tensor_ranks(shape: ModelShape, job: Job) -> float:
    """Return how often a layer's tensor ranks exchange hidden states; a gather or a scatter counts as once."""
    if not (shape.experts and job.slices_tokens) or sums_experts(shape, job):
        return job.exchanged + (3 if job.sequence_parallel else 2) * job.recompute
    return job.exchanged / 2 + 2 * job.recompute + 2 * (not job.sequence_parallel)


def edge_traffic(shape: ModelShape, job: Job) -> float:
    """Between tensor ranks at the embedding, or at the head, for one microbatch."""
    return 2 * sent(job.tp) * stream_bytes(shape, job)


def data_traffic(layers: float, tables: float, experts: float, job: Job) -> dict[str, float]:
    """Return the bytes that data ranks exchange in a step.

    Args:
        layers: entries of the layers' matrices on one rank, were they not sharded; ``tables``: of those around them;
            ``experts``: of experts.
    """
    kinds = (
        (layers, tables, job.shards, job.dp * job.cp // job.shards),
        (experts, 0.0, job.expert_shards, job.expert_replicas),
    )
    found = dict[str, float]()
    for inside, around, shards, replicas in kinds:
        gradients = job.trained * job.gradient_bytes * (inside + around)
        if shards > 1 and gradients + inside:
            gathered = job.microbatches * (2 * inside + around) if job.gathers else inside + around
            size = sent(shards) * (gradients + job.gathered_bytes * gathered)
            found["dp_shard"] = found.get("dp_shard", 0.0) + size
        if replicas > 1 and gradients:
            found["dp_replicate"] = found.get("dp_replicate", 0.0) + 2 * sent(replicas) * gradients / shards
    return found


def rank_traffic(shape: ModelShape, job: Job, place: Place) -> dict[str, float]:
    """Return the bytes that one rank exchanges in a step, by axis."""
    found = {axis: size * place.layers * job.microbatches for axis, size in layer_traffic(shape, job).items()}
    if job.tp > 1:
        found["tp"] += job.microbatches * place.ends * edge_traffic(shape, job) + 2 * sent(job.tp) * place.partial
    if job.pp > 1:
        handed = stream_bytes(shape, job) / (job.tp if job.sequence_parallel else 1)
        found["pp"] = job.microbatches * (place.forward + place.backward) * handed
    job = replace(job, trained=place.trained)
    return found | data_traffic(place.layer_weights, place.table_weights, place.expert_weights, job)
