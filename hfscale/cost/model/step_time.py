"""Estimate the seconds of a training step as a sum of terms: matrix products, attention, communication, pipeline
bubble, optimizer and others.

Per layer, for the forward and backward pass of one microbatch, with ``s`` tokens per sequence and ``q`` as the width of
all query heads together::

    products      2 FLOPs per token and weight forward, 4 backward, 2 more if a layer is recomputed, and 2 for MLPs
                  that run in tiles; 8-bit products at their own rate, plus casts
    attention     2 s q FLOPs per token forward if causal, 2.5 times as many backward (Dao 2023)
    elementwise   norms and residuals: 44 bytes per value of hidden states, 8 per value of queries, keys, values and
                  attention's result, 30 per value inside a gated MLP (14 inside a plain one), in 16 bits
    accumulation  12 bytes per weight: the gradient is written, read, and added in 32 bits
    exchange      bytes that tensor-, context- and expert-parallel collectives send in the layer, not overlapped

Matrix products are assumed to run at the same rate for every shape, because the runs to which constants were fitted
show no difference.

A synchronous pipeline takes ``sum(t_s) + (m - 1) max(t_s)`` for ``m`` microbatches, where ``t_s`` is the time of stage
``s`` for the forward and backward pass of one microbatch; with uneven stages, this is within 3.6% of a simulation of
1F1B. If each pipeline rank ``r`` has ``v`` stages, which take ``t_r`` together, the first term is ``sum(t_r) / v``
(Narayanan et al. 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ...plan import Plan
from .job import Job, Place, job_of
from .machines_known import Constants, Machine, find_machine, fitted
from .model_shape import ModelShape, shape_of_plan
from .traffic import data_bus, data_traffic, edge_traffic, layer_traffic, sent, tensor_bus

_CAST = 21  # bytes moved per value that is cast to 8 bits
_ADAPTED = 24  # bytes moved per value that an adapter product reads or writes
_TILE = 3.2  # launching a tile's norms and MLP three times takes this many times as long as launching a layer


@dataclass(frozen=True)
class Seconds:
    """Hold the seconds that one part of a model, such as a layer, takes for the forward and backward pass of one
    microbatch.
    """

    products: float = 0.0  # matrix products
    attention: float = 0.0  # scores and weighted sums
    elementwise: float = 0.0  # operations bound by memory bandwidth
    loss: float = 0.0  # head and cross entropy, products included
    accumulation: float = 0.0  # adding up gradients
    exchange: float = 0.0  # tensor-, expert- and context-parallel communication
    host: float = 0.0  # CPU time to launch kernels; not part of the sum

    @property
    def device(self) -> float:
        """Seconds for which the device computes and communicates."""
        return (
            self.products
            + self.attention
            + self.elementwise
            + self.loss
            + self.accumulation
            + self.exchange
        )

    def stage(self, constants: Constants) -> float:
        """Return the seconds that a part of the model takes: about the larger of the device's time and the CPU's time
        to launch kernels, and somewhat more if both are close.
        """
        p = constants.sharpness
        most = max(self.device, self.host)
        return (
            most * ((self.device / most) ** p + (self.host / most) ** p) ** (1 / p) if most else 0.0
        )

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Seconds)))

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(*(getattr(self, f.name) * times for f in fields(Seconds)))


def layer_seconds(shape: ModelShape, job: Job, machine: Machine, constants: Constants) -> Seconds:
    """Estimate the seconds of one layer for the forward and backward pass of one microbatch."""
    layout = job.layout
    tokens = job.tokens
    tp = job.layout.tp
    again = job.recompute
    repeated = max(job.recompute, job.elementwise)
    scores_again = 1 if job.attention_again else again
    bandwidth = constants.memory * machine.memory_bandwidth
    passes = 2 * (1 + again) + 2 + 2 * job.trained
    work = 2 if job.causal else 4
    attention = work * tokens * job.sequence * shape.queries / tp * (1 + scores_again + 2.5)
    stream = 44 * shape.hidden / (tp if job.sequence_parallel else 1)
    inside = (
        8 * (2 * shape.queries + 2 * shape.keys) + (30 if shape.gated else 14) * shape.mlp_width
    )
    moved = tokens * (stream + inside / tp) * (1 + repeated / 3) * job.value_bytes / 2
    within = passes * shape.active_weights + (
        2 * (shape.active_weights - shape.attention_weights) if job.tile else 0
    )
    fewer = job.eight * (1 - machine.flops / (machine.flops_8 or machine.flops))
    cast = (
        2 * shape.hidden
        + 2 * shape.queries
        + 2 * shape.keys
        + (3 if shape.gated else 2) * shape.mlp_width
    )
    moved += tokens / tp * (_CAST * job.eight * cast + _ADAPTED * job.adapted)
    own = shape.held(tp) + shape.expert_weights / job.expert_ranks
    exchange = constants.far_latency * tp if tp > machine.ranks_per_node else 0.0
    bytes_of = layer_traffic(shape, job)
    for size, neighbours in (
        (bytes_of.tp, tp),
        (bytes_of.ep, layout.ep * tp),
        (bytes_of.cp, layout.cp * tp),
    ):
        exchange += size / tensor_bus(neighbours, machine, constants)
    return Seconds(
        products=tokens * within / tp / _product_rate(machine, constants) * (1 - fewer),
        attention=attention / (constants.attention * machine.flops),
        elementwise=(constants.elementwise * moved + job.decoded * own) / bandwidth,
        accumulation=12 * job.trained * own / bandwidth,
        exchange=exchange,
        host=constants.layer_host
        * (1 + repeated / 3 + (_TILE * tokens / job.tile if job.tile else 0)),
    )


def pair_cost(plan: Plan, config: Any) -> float:
    """Return the constant ``pair_cost`` with which a row of ``n`` packed tokens takes a time proportional to ``n + n *
    n * pair_cost``: the second term is that of attention. It is computed for an H100.
    """
    shape = shape_of_plan(plan, config)
    job = job_of(plan, sequence=1, batch=1, microbatches=1)
    given = shape, job, find_machine("h100"), fitted()
    layer = layer_seconds(*given)
    head = head_seconds(*given)
    rest = layer.products + layer.elementwise + head.loss / len(plan.layers)
    return layer.attention / rest


def head_seconds(shape: ModelShape, job: Job, machine: Machine, constants: Constants) -> Seconds:
    """Estimate the seconds of the head and the loss for one microbatch; the vocabulary is sharded over tensor-parallel
    ranks.
    """
    bandwidth = constants.memory * machine.memory_bandwidth
    logits = job.tokens * shape.vocabulary / job.layout.tp
    products = (4 + 2 * job.trained) * logits * shape.hidden / _product_rate(machine, constants)
    return Seconds(
        loss=products + constants.loss_bytes * logits / bandwidth,
        accumulation=12 * job.trained * shape.table_weights / job.layout.tp / bandwidth,
        host=constants.ends_host,
    )


def _product_rate(machine: Machine, constants: Constants) -> float:
    return (machine.products or constants.products) * machine.flops


# A layer, the head, and the communication of tensor-parallel ranks at embedding or head.
Parts = tuple[Seconds, Seconds, Seconds]


def part_seconds(shape: ModelShape, job: Job, machine: Machine, constants: Constants) -> Parts:
    """Return the seconds, for one microbatch, of a layer, of the head with the loss, and of the communication of
    tensor-parallel ranks at the embedding or the head.
    """
    edge = edge_traffic(shape, job) / tensor_bus(job.layout.tp, machine, constants)
    given = shape, job, machine, constants
    return layer_seconds(*given), head_seconds(*given), Seconds(exchange=edge)


def stage_seconds(places: Sequence[Place], parts: Parts) -> list[Seconds]:
    """Return the seconds of each pipeline rank for one microbatch, from the seconds of a layer, of the head, and of
    communication at the embedding or head (``parts``).
    """
    layer, head, edge = parts
    return [layer * place.layers + head * place.head + edge * place.ends for place in places]


@dataclass(frozen=True)
class StepTime(Seconds):
    """Hold the seconds of one step as terms whose sum is :attr:`total`. The terms of :class:`Seconds`, such as matrix
    products, are those of the slowest pipeline rank; ``host`` is the time for which its device waits for the CPU.
    """

    handover: float = 0.0  # transfers between stages
    bubble: float = 0.0  # waiting for other stages
    data: float = 0.0  # data-parallel communication that is not overlapped
    update: float = 0.0
    offload: float = 0.0  # transfers to CPU memory and back that are not overlapped
    other: float = 0.0  # other work of a step

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of each term of a step, such as ``products`` or ``bubble``."""
        return dict(vars(self))

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.terms.values())


def step_time(
    stages: Sequence[Seconds],  # per pipeline rank: a microbatch's forward and backward pass
    weights: Sequence[float],  # per pipeline rank: entries, summed over its data-parallel ranks
    job: Job,
    machine: Machine,
    constants: Constants,
    bubble: float
    | None = None,  # seconds that the slowest stage waits, if a schedule was simulated
    experts: Sequence[float]
    | None = None,  # per rank: expert entries, summed over the data-parallel ranks that shard them
    parts: int | None = None,  # parts of a stage's time; other stages wait only for the first part
) -> StepTime:
    """Estimate the seconds of one step from each pipeline rank's seconds per microbatch (``stages``), and the numbers
    of entries of its weights and experts.

    ``bubble`` is the time that the slowest rank waits for others, if a schedule was simulated. Without it, other ranks
    wait only for the first of ``parts`` equal parts of a rank's time, by default one per stage.
    """
    hop = constants.hop if job.layout.pp > 1 else 0.0
    taken = [stage.stage(constants) + hop for stage in stages]
    slowest = max(range(len(taken)), key=taken.__getitem__)
    one = stages[slowest]
    many = job.microbatches
    if bubble is None:
        bubble = (sum(taken) - taken[slowest]) / (parts or job.virtual)
    spread = experts or [0.0] * len(weights)
    most = max(
        range(len(weights)),
        key=lambda rank: weights[rank] + spread[rank],
    )
    own = max(job.shard_of(w, e) for w, e in zip(weights, spread, strict=True))
    moved = constants.update_bytes * job.trained * own
    # Used for optimizer steps in CPU memory, too, because the bandwidth of CPU memory is not known.
    to_host = constants.memory * machine.host_bandwidth
    return StepTime(
        **{term: many * seconds for term, seconds in vars(one).items() if term != "host"},
        host=many * (taken[slowest] - hop - one.device),
        handover=many * hop,
        bubble=bubble,
        data=_data_seconds(
            weights[most], spread[most], 2 / 3 * taken[slowest], job, machine, constants
        ),
        update=moved
        / (to_host if job.steps_on_host else constants.memory * machine.memory_bandwidth),
        offload=max(0.0, job.offloaded / to_host - many * taken[slowest]),
        other=constants.step,
    )


def _data_seconds(
    weights: float,
    experts: float,
    backward: float,
    job: Job,
    machine: Machine,
    constants: Constants,
) -> float:
    """Return the seconds that a step waits for data-parallel communication. Communication that overlaps with the last
    backward pass, of ``backward`` seconds, is not counted.
    """
    layout = job.layout
    shards = job.layout.dp_shard
    if layout.data_world == 1:
        return 0.0
    bus = data_bus(shards, layout.tp, machine, constants)
    replicas_bus = data_bus(layout.dp_replicate, layout.tp * shards, machine, constants)
    once = replace(job, gathers=False, gathered_bytes=0 if job.gathers else job.gathered_bytes)
    bytes_of = data_traffic(weights, 0.0, experts, once)
    moved = bytes_of.dp_shard / bus + bytes_of.dp_replicate / replicas_bus
    latency = constants.latency
    hidden = constants.hidden
    if shards > 1:
        latency = constants.latency_shards
        hidden = constants.hidden_shards
    exposed = max(moved - hidden * backward, 0.0) + latency * (layout.data_world - 1)
    if not job.gathers:
        return exposed
    # A layer is gathered while the previous layer computes; the rest of the transfer is exposed, in both passes.
    whole = sent(shards) * weights + sent(layout.size("edp_shard")) * experts
    gathered = 2 * job.gathered_bytes * whole / bus
    return exposed + job.microbatches * max(gathered - 1.5 * backward, 0.0)
