"""Seconds and bytes of a candidate by arithmetic on a model's summary: what a search can afford for thousands of them.

Seconds are the time model's. Bytes are those of :mod:`hfscale.cost.model.memory` for layers of one kind; a test
compares the two. What is the same for many candidates is computed once: a layer's seconds, the cut into stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...parallel.pipeline.in_flight import in_flight_of_ranks
from ...plan import balance
from ...planner.costs import Cost
from ..model.job import Job, Place
from ..model.machine import Constants, Machine
from ..model.memory import OVERHEAD, likely_bytes
from ..model.step_time import Parts, part_seconds, stage_seconds, step_time
from .candidates import Candidate
from .model_summary import ModelSummary

_SIZES = ("tp", "pp", "dp", "cp", "ep", "virtual", "batch", "microbatches")


@dataclass(frozen=True)
class CandidateCost:
    """A candidate with what it takes and holds, on the fullest rank."""

    candidate: Candidate
    seconds: float  # of a step
    needed: float  # bytes without which it does not run
    likely: float  # bytes that it is likely to reserve
    states: float  # of these, weights, gradients and optimizer
    activations: float  # of these, what is kept for backward passes


class FastCost:
    """Estimates candidates of one model on one machine."""

    def __init__(self, summary: ModelSummary, machine: Machine, constants: Constants, sequence: int) -> None:
        self.summary, self.machine, self.constants, self.sequence = summary, machine, constants, sequence
        self._parts: dict[tuple[int, ...], Parts] = {}
        self._stages: dict[tuple[int, int, str], tuple[int, ...]] = {}

    def estimate(self, candidate: Candidate) -> CandidateCost:
        """Return seconds and bytes of one candidate."""
        job = self._job(candidate)
        places = self._places(candidate, job)
        stages = stage_seconds(places, self._seconds(candidate, job))
        if candidate.schedule == "zbv":  # ranks wait for a forward pass of half their layers, and for nothing else
            job = replace(job, virtual=6)
        job = self._with_host(candidate, job, places)
        weights, experts = [place.weights for place in places], [place.expert_weights for place in places]
        time = step_time(stages, weights, job, self.machine, self.constants, experts=experts)
        held = (self._bytes(candidate, job, rank, place) for rank, place in enumerate(places))
        states, activations, needed = max(held, key=lambda rank: rank[2])
        return CandidateCost(candidate, time.total, needed, likely_bytes(needed, activations), states, activations)

    def _job(self, c: Candidate) -> Job:
        shards = c.shard * c.cp
        sizes: dict[str, Any] = {name: getattr(c, name) for name in _SIZES}
        sizes |= {"shards": shards, "gathers": shards > 1 and c.pp == 1, "sequence_parallel": c.tp > 1}
        return replace(self.summary.job, sequence=self.sequence, recompute=float(c.recompute), **sizes)

    def _with_host(self, c: Candidate, job: Job, places: Sequence[Place]) -> Job:
        if not c.offload:
            return job
        most = max(place.layers for place in places)
        activations = 2 * job.tokens * c.microbatches * most * self._kept(c)[c.recompute]
        own = max(job.shard_of(place.weights, place.expert_weights) for place in places)
        return job.with_host(c.offload, activations, own)

    def _kept(self, c: Candidate) -> tuple[float, float]:
        """Return the bytes that a layer keeps of a token, and of these its input."""
        found = self.summary
        kept = found.kept_spread if c.ep > 1 else found.kept_alone if c.dp * c.cp == 1 else found.kept
        return kept.over(c.tp), found.stream / c.tp

    def _seconds(self, c: Candidate, job: Job) -> Parts:
        key = (c.tp, c.cp, c.ep, c.batch, c.recompute)
        if key not in self._parts:
            self._parts[key] = part_seconds(self.summary.shape, job, self.machine, self.constants)
        return self._parts[key]

    def _places(self, c: Candidate, job: Job) -> list[Place]:
        shape, found, last = self.summary.shape, list[Place](), 0 if c.schedule == "zbv" else c.pp - 1
        for rank, layers in enumerate(self._layers(c)):
            embedding, head = rank == 0, rank == last
            tables = embedding or head if shape.tied else embedding + head
            weights = layers * shape.held(c.tp), layers * shape.expert_weights / job.expert_ranks
            found.append(Place(layers, embedding, head, *weights, tables * shape.table_weights / c.tp))
        return found

    def _layers(self, c: Candidate) -> tuple[int, ...]:
        """Return how many layers each pipeline rank gets, by the planner's own costs and balance."""
        key, shape, p = (c.pp, c.virtual, c.schedule), self.summary.shape, c.pp
        if key not in self._stages:
            layer = Cost(2 * shape.active_weights, shape.layer_weights).work()
            before = Cost(0, shape.table_weights).work()
            after = Cost(2 * shape.table_weights, 0 if shape.tied else shape.table_weights).work()
            counts = balance([layer] * shape.layers, p * c.virtual, before, after)
            back = c.schedule == "zbv"  # whose second stages lie in reverse order
            self._stages[key] = tuple(
                counts[rank] + counts[2 * p - 1 - rank] if back else sum(counts[rank::p]) for rank in range(p)
            )
        return self._stages[key]

    def _bytes(self, c: Candidate, job: Job, rank: int, place: Place) -> tuple[float, float, float]:
        """Return states, activations, and all that one rank needs."""
        found, shape, layers = self.summary, self.summary.shape, place.layers
        on_host = found.states if "parameters" in c.offload else found.optimizer if "optimizer" in c.offload else 0.0
        states = (found.states - on_host) * job.shard_of(place.weights, place.expert_weights)
        kept, stream = self._kept(c)
        held = in_flight_of_ranks(c.schedule, c.pp, c.microbatches, c.virtual)[rank] / c.virtual * layers
        held = min(held, 2) if "activations" in c.offload else held
        activations = job.tokens * (held * (stream if c.recompute else kept) + kept * c.recompute + stream)
        width, gathered, loss = job.gathered_bytes, 0.0, 0.0
        if c.dp * c.cp > 1:
            layer = shape.held(c.tp) + shape.expert_weights / job.expert_ranks
            whole = layers if c.pp > 1 or job.shards == 1 else min(layers, 1)
            gathered = width * (whole * layer + place.table_weights)
        elif width < found.weight:
            gathered = 2 * (place.weights + place.expert_weights)
        if place.head:
            loss = found.head * shape.table_weights / c.tp + 8 * job.tokens / 4 * shape.vocabulary / c.tp
        return states, activations, states + activations + gathered + loss + OVERHEAD
