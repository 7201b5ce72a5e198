"""Seconds and bytes of a candidate by arithmetic on a model's facts: what a search can afford for thousands of them.

What is the same for many candidates is computed once: a layer's seconds, the microbatches alive of a schedule. The
bytes are those of :mod:`hfscale.cost.model.memory` for layers of one kind; a test compares the two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...parallel.pipeline.in_flight import in_flight_of_ranks
from ...plan import balance
from ...plan.drafting.costs import Cost
from ..model.constants import Constants
from ..model.job import Job
from ..model.jobs import shard_traffic
from ..model.layer_time import Seconds, edge_seconds, head_seconds, layer_seconds
from ..model.machine import Machine
from ..model.step_time import step_time
from .candidates import Candidate
from .model_summary import ModelSummary
from .report import DOES_NOT_FIT, FITS, FRAGMENTS, OVERHEAD, TIGHT


@dataclass(frozen=True)
class CandidateCost:
    """A candidate with what it takes and holds.

    Attributes:
        seconds: of a step.
        needed: bytes of the fullest rank without which it does not run.
        likely: bytes that it is likely to reserve.
        states: of these, weights, gradients and optimizer.
        activations: of these, what is kept for backward passes.
    """

    candidate: Candidate
    seconds: float
    needed: float
    likely: float
    states: float
    activations: float

    def verdict(self, machine: Machine, budget: float) -> str:
        """``fits``, ``tight`` or ``does not fit``."""
        if self.needed > machine.memory:
            return DOES_NOT_FIT
        return FITS if self.likely <= budget else TIGHT


class FastCost:
    """Estimates candidates of one model on one machine."""

    def __init__(self, facts: ModelSummary, machine: Machine, constants: Constants, sequence: int) -> None:
        self.facts, self.machine, self.constants, self.sequence = facts, machine, constants, sequence
        self._parts: dict[tuple[int, ...], tuple[Seconds, Seconds, Seconds]] = {}
        self._places: dict[tuple[int, int, str], tuple[int, ...]] = {}

    def estimate(self, candidate: Candidate) -> CandidateCost:
        """Seconds and bytes of one candidate."""
        job, layers = self._job(candidate), self._layers(candidate)
        layer, head, embedding = self._seconds(candidate, job)
        last = 0 if candidate.schedule == "zbv" else candidate.pp - 1
        stages = [layer * count for count in layers]
        stages[0] += embedding
        stages[last] += head
        weights = [self._weights(candidate, rank, count) for rank, count in enumerate(layers)]
        experts = [count * self.facts.shape.expert_weights / job.expert_ranks for count in layers]
        if candidate.schedule == "zbv":  # ranks wait for a forward pass of half their layers, and for nothing else
            job = replace(job, virtual=6)
        own = [w / job.shards + e / job.expert_shards for w, e in zip(weights, experts, strict=True)]
        job = self._with_host(candidate, job, layers, max(own))
        time = step_time(stages, weights, job, self.machine, self.constants, experts=experts)
        states, activations, needed = max(
            (self._bytes(candidate, job, rank, count, weights[rank]) for rank, count in enumerate(layers)),
            key=lambda held: held[2],
        )
        likely = needed + (FRAGMENTS - 1) * activations
        return CandidateCost(candidate, time.total, needed, likely, states, activations)

    def _job(self, c: Candidate) -> Job:
        return Job(
            sequence=self.sequence,
            batch=c.batch,
            microbatches=c.microbatches,
            tp=c.tp,
            pp=c.pp,
            dp=c.dp,
            cp=c.cp,
            ep=c.ep,
            shards=c.shard * c.cp,
            gathers=c.shard * c.cp > 1 and c.pp == 1,
            virtual=c.virtual,
            sequence_parallel=c.tp > 1,
            recompute=float(c.recompute),
            trained=self.facts.trained,
            value_bytes=self.facts.value,
            gradient_bytes=self.facts.gradient,
            gathered_bytes=self.facts.width,
            unpacked=self.facts.unpacked,
            ranks_per_node=self.machine.ranks_per_node,
        )

    def _with_host(self, c: Candidate, job: Job, layers: Sequence[int], entries: float) -> Job:
        if not c.offload:
            return job
        facts = self.facts
        offloaded, handed = 0.0, 0.0
        if "activations" in c.offload:
            offloaded += 2 * job.tokens * c.microbatches * max(layers) * self._kept(c)[c.recompute]
        if "parameters" in c.offload:
            offloaded += shard_traffic(job) * entries
        if "optimizer" in c.offload:
            handed = (facts.gradient + facts.width) * facts.trained * entries
        on_host = c.offload[0] != "activations"
        return replace(job, offloaded=offloaded, handed=handed, steps_on_host=on_host)

    def _kept(self, c: Candidate) -> tuple[float, float]:
        """Bytes that a layer keeps of a token, and of these its input."""
        facts = self.facts
        kept = facts.kept_spread if c.ep > 1 else facts.kept_alone if c.dp * c.cp == 1 else facts.kept
        return kept.over(c.tp), facts.stream / c.tp

    def _seconds(self, c: Candidate, job: Job) -> tuple[Seconds, Seconds, Seconds]:
        key = (c.tp, c.cp, c.ep, c.batch, c.recompute)
        if key not in self._parts:
            given = (self.facts.shape, job, self.machine, self.constants)
            edge = edge_seconds(*given)
            self._parts[key] = layer_seconds(*given), head_seconds(*given) + edge, edge
        return self._parts[key]

    def _layers(self, c: Candidate) -> tuple[int, ...]:
        """How many layers each pipeline rank gets, by the planner's own costs and balance."""
        key = (c.pp, c.virtual, c.schedule)
        if key not in self._places:
            counts, p = self._balanced(c.pp * c.virtual), c.pp
            if c.schedule == "zbv":
                self._places[key] = tuple(counts[rank] + counts[2 * p - 1 - rank] for rank in range(p))
            else:
                self._places[key] = tuple(sum(counts[rank::p]) for rank in range(p))
        return self._places[key]

    def _balanced(self, stages: int) -> tuple[int, ...]:
        shape = self.facts.shape
        layer = Cost(2 * shape.active_weights, shape.layer_weights).work()
        before = Cost(0, shape.table_weights).work()
        after = Cost(2 * shape.table_weights, 0 if shape.tied else shape.table_weights).work()
        return balance([layer] * shape.layers, stages, before, after)

    def _weights(self, c: Candidate, rank: int, layers: int) -> float:
        """Entries of matrices of one rank, over its data ranks all together, without experts."""
        shape = self.facts.shape
        ends = (rank == 0) + (rank == (0 if c.schedule == "zbv" else c.pp - 1))
        tables = min(ends, 1) if shape.tied else ends
        return layers * shape.held(c.tp) + tables * shape.table_weights / c.tp

    def _bytes(self, c: Candidate, job: Job, rank: int, layers: int, weights: float) -> tuple[float, float, float]:
        """States, activations, and all that one rank needs."""
        facts, shape = self.facts, self.facts.shape
        expert = shape.expert_weights / job.expert_ranks
        own = weights / job.shards + layers * expert / job.expert_shards
        on_host = facts.states if "parameters" in c.offload else facts.optimizer if "optimizer" in c.offload else 0.0
        states = (facts.states - on_host) * own
        tokens = c.batch * self.sequence / c.cp
        alone = c.dp * c.cp == 1
        kept, stream = self._kept(c)
        one = stream if c.recompute else kept
        alive = in_flight_of_ranks(c.schedule, c.pp, c.microbatches, c.virtual)[rank] / c.virtual
        held = alive * layers
        held = min(held, 2) if "activations" in c.offload else held
        activations = tokens * (held * one + kept * c.recompute + stream)
        gathered = 2 * (weights + layers * expert) if alone and facts.width < facts.weight else 0.0
        if c.dp * c.cp > 1:
            whole = layers if c.pp > 1 or job.shards == 1 else min(layers, 1)
            tables = weights - layers * shape.held(c.tp)
            gathered = facts.width * (whole * (shape.held(c.tp) + expert) + tables)
        loss = 0.0
        if rank == (0 if c.schedule == "zbv" else c.pp - 1):
            loss = facts.head * shape.table_weights / c.tp + 8 * tokens / 4 * shape.vocabulary / c.tp
        return states, activations, states + activations + gathered + loss + OVERHEAD
