"""Bytes that a rank sends to the others of an axis, from the shape of a model and what a step is asked to do.

Collectives run as rings: with ``n`` ranks, ``(n-1)/n`` of a gather's or a scatter's whole tensor, twice that for an
all-reduce. With ``x`` the bytes of a microbatch's stream and ``w`` those of a rank's weights, were they not sharded::

    tp             8 x (n-1)/n for each layer: two blocks, a gather and a scatter (or an all-reduce) both ways;
                   10 where inputs are gathered again for the weights' gradients; of a layer that is recomputed all
                   of its forward pass but the last scatter besides: 3, or the 2 of one all-reduce;
                   2 at the embedding and 2 at the head
    ep             4 x (n-1)/n for each expert that a token is sent to: there and back, and their gradients
    cp             3 (n-1)/n of all keys and values: gathered in both passes, and their gradients scattered
    pp             x forward and its gradient backward, cut over the tensor ranks where the sequence is
    dp_shard       (n-1)/n w once, to reduce gradients; weights are gathered once, or, without stages, in both passes of
                   every microbatch, those around the layers in one
    dp_replicate   2 (n-1)/n of the shards' gradients
"""

from dataclasses import dataclass

from .job import Job
from .links import sent
from .model_shape import ModelShape


@dataclass(frozen=True)
class Place:
    """What a pipeline rank has.

    Attributes:
        layers: how many.
        embedding: whether it has it; ``head``: likewise.
        forward: how many of its stages hand their output to another rank; ``backward``: likewise gradients.
        layer_weights: entries of the layers' matrices on this rank, over its data ranks all together.
        table_weights: likewise of the matrices around the layers.
    """

    layers: int
    embedding: bool
    head: bool
    forward: int
    backward: int
    layer_weights: float
    table_weights: float

    @property
    def ends(self) -> int:
        """How many of embedding and head."""
        return self.embedding + self.head


def stream_bytes(shape: ModelShape, job: Job) -> float:
    """Of a microbatch's hidden states, on all tensor ranks."""
    return job.value_bytes * job.tokens * shape.hidden


def layer_traffic(shape: ModelShape, job: Job) -> dict[str, float]:
    """Of one layer and microbatch, by axis, forward and backward."""
    stream, found = stream_bytes(shape, job), dict[str, float]()
    if job.tp > 1:
        again = 3 if job.sequence_parallel else 2
        found["tp"] = (job.exchanged + again * job.recompute) * sent(job.tp) * stream
    if job.ep > 1 and shape.experts:
        times = 4 * shape.routed / (job.tp if job.sequence_parallel else 1)
        found["ep"] = times * sent(job.ep) * stream
    if job.cp > 1:
        keys = 2 * job.value_bytes * job.tokens * job.cp * shape.keys / job.tp
        found["cp"] = 3 * sent(job.cp) * keys
    return found


def edge_traffic(shape: ModelShape, job: Job) -> float:
    """Between tensor ranks at the embedding, or at the head, for one microbatch."""
    return 2 * sent(job.tp) * stream_bytes(shape, job)


def data_traffic(layers: float, tables: float, job: Job) -> dict[str, float]:
    """Of a step, between data ranks.

    Args:
        layers: entries of the layers' matrices on one rank, were they not sharded; ``tables``: of those around them.
    """
    weights, found = layers + tables, dict[str, float]()
    gradients, replicas = job.trained * job.gradient_bytes * weights, job.dp * job.cp // job.shards
    if job.shards > 1:
        gathered = job.microbatches * (2 * layers + tables) if job.gathers else weights
        found["dp_shard"] = sent(job.shards) * (gradients + job.gathered_bytes * gathered)
    if replicas > 1:
        found["dp_replicate"] = 2 * sent(replicas) * gradients / job.shards
    return found


def rank_traffic(shape: ModelShape, job: Job, place: Place) -> dict[str, float]:
    """Of a step and one rank, by axis."""
    found = {axis: size * place.layers * job.microbatches for axis, size in layer_traffic(shape, job).items()}
    if job.tp > 1:
        found["tp"] += job.microbatches * place.ends * edge_traffic(shape, job)
    if job.pp > 1:
        handed = stream_bytes(shape, job) / (job.tp if job.sequence_parallel else 1)
        found["pp"] = job.microbatches * (place.forward + place.backward) * handed
    return found | data_traffic(place.layer_weights, place.table_weights, job)
