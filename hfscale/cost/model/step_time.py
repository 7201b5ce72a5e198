"""Seconds of a step by what they go to: stages, the pipeline's bubble, what data ranks exchange, the update.

A pipeline with a flush takes ``sum(t_s) + (m - 1) max(t_s)`` with ``t_s`` a stage's forward and backward pass of one
microbatch: with uneven stages as well, within 3.6% of playing 1F1B through. With ``v`` stages on a rank the first
term is that of one of them: ``sum(t_r) / v`` (Narayanan et al. 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from .constants import Constants
from .job import Job
from .layer_time import Seconds
from .links import data_bus, sent
from .machine import Machine
from .traffic import data_traffic


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by term; their sum is :attr:`total`.

    Attributes:
        products: matrix products of the slowest stage.
        attention: its attention kernels.
        elementwise: what reads and writes memory there: norms, activations, residuals.
        loss: head and cross entropy, where that stage has them.
        accumulation: adding gradients up.
        exchange: its tensor, expert and context ranks' collectives.
        host: what its device waits for the host that launches.
        handover: between stages.
        bubble: waiting for other stages.
        data: gradients and weights between data ranks, as far as nothing hides them.
        update: the optimizer.
        offload: what goes to the host and back, as far as nothing hides it.
        other: of a step's own.
    """

    products: float
    attention: float
    elementwise: float
    loss: float
    accumulation: float
    exchange: float
    host: float
    handover: float
    bubble: float
    data: float
    update: float
    offload: float
    other: float

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by term."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> float:
        """Of the step."""
        return sum(self.terms.values())


def step_time(
    stages: Sequence[Seconds],
    weights: Sequence[float],
    job: Job,
    machine: Machine,
    constants: Constants,
    bubble: float | None = None,
    experts: Sequence[float] | None = None,
) -> StepTime:
    """Of one step.

    Args:
        stages: for each pipeline rank, a microbatch's forward and backward pass.
        weights: for each, how many entries of weights it has, over data ranks all together.
        bubble: seconds that the slowest stage waits for others, where a schedule was played through.
        experts: for each, entries of experts besides, over the data ranks that share these out.
    """
    hop = constants.hop if job.pp > 1 else 0.0
    taken = [stage.stage(constants) + hop for stage in stages]
    slowest = max(range(len(taken)), key=taken.__getitem__)
    one, many = stages[slowest], job.microbatches
    if bubble is None:
        bubble = (sum(taken) - taken[slowest]) / job.virtual
    spread = experts or [0.0] * len(weights)
    most = max(range(len(weights)), key=lambda rank: weights[rank] + spread[rank])
    data = data_seconds(weights[most], spread[most], 2 / 3 * taken[slowest], job, machine, constants)
    own = max(w / max(1, job.shards) + e / job.expert_shards for w, e in zip(weights, spread, strict=True))
    moved = constants.update_bytes * job.trained * own
    to_host = constants.memory * machine.host_bandwidth  # for want of a better number, the host's own memory's too
    return StepTime(
        products=many * one.products,
        attention=many * one.attention,
        elementwise=many * one.elementwise,
        loss=many * one.loss,
        accumulation=many * one.accumulation,
        exchange=many * one.exchange,
        host=many * (taken[slowest] - hop - one.device),
        handover=many * hop,
        bubble=bubble,
        data=data,
        update=moved / (to_host if job.steps_on_host else constants.memory * machine.memory_bandwidth),
        offload=max(0.0, job.offloaded / to_host - many * taken[slowest]) + job.handed / to_host,
        other=constants.step,
    )


def data_seconds(
    weights: float, experts: float, backward: float, job: Job, machine: Machine, constants: Constants
) -> float:
    """Seconds that a step waits for its data ranks, after what the backward pass hides.

    Args:
        weights: entries on one rank, were they not sharded; ``experts``: of experts.
        backward: seconds of the last microbatch's backward pass.
    """
    if job.dp * job.cp == 1:
        return 0.0
    buses = {
        "dp_shard": data_bus(job.shards, job.tp, machine, constants),
        "dp_replicate": data_bus(job.dp * job.cp // job.shards, job.tp * job.shards, machine, constants),
    }
    sharded = job.shards > 1
    once = replace(job, gathers=False, gathered_bytes=0 if job.gathers else job.gathered_bytes)
    moved = sum(size / buses[axis] for axis, size in data_traffic(weights, 0.0, experts, once).items())
    latency = (constants.latency_shards if sharded else constants.latency) * (job.dp * job.cp - 1)
    hidden = (constants.hidden_shards if sharded else constants.hidden) * backward
    exposed = max(moved - hidden, 0.0) + latency
    if not job.gathers:
        return exposed
    # Whole layers are gathered while the one before computes: what that does not hide remains, in both passes.
    whole = sent(job.shards) * weights + sent(job.expert_shards) * experts
    gathered = 2 * job.gathered_bytes * whole / buses["dp_shard"]
    return exposed + job.microbatches * max(gathered - 1.5 * backward, 0.0)
