"""Seconds that the parts of a decoder take on one rank, for a microbatch, forward and backward.

::

    products      2 for every token and weight forward, 4 backward, 2 more where a layer is recomputed
    attention     2 s q forward for every token where it is causal, 2.5 times that backward (Dao 2023)
    elementwise   norms and residuals 44 bytes for every value of the stream, 8 for every value of queries, keys, values
                  and attention's result, 30 for every value inside of a gated MLP (14 of a plain one), in 16 bits
    accumulation  12 bytes for every weight: the gradient is written, read, and added in 32 bits
    exchange      what the blocks' collectives send within the layer, exposed

Products of one shape are as fast as of another: that they are not could not be told from the runs.
"""

from dataclasses import dataclass, fields

from .constants import Constants
from .job import Job
from .links import tensor_bus, tensor_latency
from .machine import Machine
from .model_shape import ModelShape
from .traffic import edge_traffic, layer_traffic


@dataclass(frozen=True)
class Seconds:
    """Of one part of a model, for one microbatch.

    Attributes:
        products: matrix products.
        attention: scores and weighted sums.
        elementwise: what reads and writes memory.
        loss: head and cross entropy, products included.
        accumulation: adding gradients up.
        exchange: tensor, expert and context ranks waiting for each other.
        host: launching all of it; not part of the sum.
    """

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    loss: float = 0.0
    accumulation: float = 0.0
    exchange: float = 0.0
    host: float = 0.0

    @property
    def device(self) -> float:
        """All that the device does."""
        return self.products + self.attention + self.elementwise + self.loss + self.accumulation + self.exchange

    def stage(self, constants: Constants) -> float:
        """What it takes: as long as the device, or the host that launches."""
        p = constants.sharpness
        most = max(self.device, self.host)
        return most * ((self.device / most) ** p + (self.host / most) ** p) ** (1 / p) if most else 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Seconds)))

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(*(getattr(self, f.name) * times for f in fields(Seconds)))


def layer_seconds(shape: ModelShape, job: Job, machine: Machine, constants: Constants) -> Seconds:
    """Of one layer."""
    tokens, tp = job.tokens, job.tp
    again = job.recompute
    scores_again = 1 if job.attention_again else again
    bandwidth = constants.memory * machine.memory_bandwidth
    passes = 2 * (1 + again) + 2 + 2 * job.trained
    work = 2 if job.causal else 4
    attention = work * tokens * job.sequence * shape.queries / tp * (1 + scores_again + 2.5)
    stream = 44 * shape.hidden / (tp if job.sequence_parallel else 1)
    inside = 8 * (2 * shape.queries + 2 * shape.keys) + (30 if shape.gated else 14) * shape.mlp_width
    moved = tokens * (stream + inside / tp) * (1 + again / 3) * job.value_bytes / 2
    own = shape.held(tp) + shape.expert_weights / job.expert_ranks
    return Seconds(
        products=passes * tokens * shape.active_weights / tp / _product_rate(machine, constants),
        attention=attention / (constants.attention * machine.flops),
        elementwise=(constants.elementwise * moved + job.unpacked * own) / bandwidth,
        accumulation=12 * job.trained * own / bandwidth,
        exchange=_exchange(shape, job, machine, constants),
        host=constants.layer_host * (1 + again / 3),
    )


def head_seconds(shape: ModelShape, job: Job, machine: Machine, constants: Constants) -> Seconds:
    """Of the head with its loss; the vocabulary is cut over tensor ranks."""
    bandwidth = constants.memory * machine.memory_bandwidth
    logits = job.tokens * shape.vocabulary / job.tp
    products = (4 + 2 * job.trained) * logits * shape.hidden / _product_rate(machine, constants)
    return Seconds(
        loss=products + constants.loss_bytes * logits / bandwidth,
        accumulation=12 * job.trained * shape.table_weights / job.tp / bandwidth,
        host=constants.ends_host,
    )


def _product_rate(machine: Machine, constants: Constants) -> float:
    return (machine.products or constants.products) * machine.flops


def edge_seconds(shape: ModelShape, job: Job, machine: Machine, constants: Constants) -> Seconds:
    """Of what tensor ranks exchange at the embedding, or at the head."""
    if job.tp == 1:
        return Seconds()
    return Seconds(exchange=edge_traffic(shape, job) / tensor_bus(job.tp, machine, constants))


def _exchange(shape: ModelShape, job: Job, machine: Machine, constants: Constants) -> float:
    """Seconds that a layer waits for other tensor, expert and context ranks."""
    neighbours = {"tp": job.tp, "ep": job.ep * job.tp, "cp": job.cp * job.tp}
    found = tensor_latency(job.tp, machine, constants)
    for axis, size in layer_traffic(shape, job).items():
        found += size / tensor_bus(neighbours[axis], machine, constants)
    return found
