"""Compute the seconds and bytes of a candidate from a model's summary, fast enough to search thousands.

Seconds are the time model's. Bytes are those of :mod:`hfscale.cost.model.memory_model` for layers of one kind; a test
compares the two. What is the same for many candidates is computed once: a layer's seconds, the cut into stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...parallel.pipeline.in_flight import in_flight_of_ranks
from ...plan import balance
from ...plan.drafting.costs import Cost
from ..model.job import Job, Place
from ..model.machines_known import Constants, Machine
from ..model.memory_model import OVERHEAD, likely_bytes
from ..model.step_time import Parts, part_seconds, stage_seconds, step_time
from .candidates import Candidate
from .model_summary import ModelSummary


@dataclass(frozen=True)
class CandidateCost:
    """Hold a candidate with its seconds and the bytes of its fullest rank."""

    candidate: Candidate
    seconds: float  # of a step
    needed: float  # bytes without which it does not run
    likely: float  # bytes that it is likely to reserve
    states: float  # of these, weights, gradients and optimizer
    activations: float  # of these, what is kept for backward passes

    @property
    def mostly(self) -> str:
        """The kind that takes most of its bytes, in words."""
        return "weights, gradients and optimizer" if self.states > self.activations else "activations"

    def to_dict(self) -> dict[str, Any]:
        """Return layout, seconds and bytes as plain numbers and words."""
        return {**self.candidate.to_dict(), "seconds": self.seconds, "needed": self.needed, "likely": self.likely}


class FastCost:
    """Estimate candidates of one model on one machine."""

    def __init__(self, summary: ModelSummary, machine: Machine, constants: Constants) -> None:
        self.summary, self.machine, self.constants = summary, machine, constants
        self._parts: dict[tuple[float, ...], Parts] = {}
        self._stages: dict[tuple[int, int, str], tuple[int, ...]] = {}

    def estimate(self, candidate: Candidate) -> CandidateCost:
        """Return seconds and bytes of one candidate."""
        job = candidate.job
        places = self._places(candidate)
        stages = stage_seconds(places, self._seconds(job))
        parts = 6 if candidate.schedule == "zbv" else None  # ranks wait for a forward pass of half their layers alone
        job = self._with_host(candidate, job, places)
        weights, experts = [place.weights for place in places], [place.expert_weights for place in places]
        time = step_time(stages, weights, job, self.machine, self.constants, experts=experts, parts=parts)
        held = (self._bytes(candidate, rank, place) for rank, place in enumerate(places))
        states, activations, needed = max(held, key=lambda rank: rank[2])
        return CandidateCost(candidate, time.total, needed, likely_bytes(needed, activations), states, activations)

    def _with_host(self, c: Candidate, job: Job, places: Sequence[Place]) -> Job:
        if not c.offload:
            return job
        kept, stream = self._kept(job)
        layers = max(place.layers for place in places)
        activations = 2 * job.tokens * job.microbatches * layers * (stream if c.recomputes else kept)
        own = max(job.shard_of(place.weights, place.expert_weights) for place in places)
        return job.with_host(c.offload, activations, own)

    def _kept(self, job: Job) -> tuple[float, float]:
        """Return the bytes per token that a layer keeps, and those of its input."""
        found, layout = self.summary, job.layout
        kept = found.kept_spread if layout.ep > 1 else found.kept_alone if layout.data_world == 1 else found.kept
        return kept.over(layout.tp), found.stream / layout.tp

    def _seconds(self, job: Job) -> Parts:
        layout = job.layout
        key = (layout.tp, layout.cp, layout.ep, job.batch, job.recompute)
        if key not in self._parts:
            self._parts[key] = part_seconds(self.summary.shape, job, self.machine, self.constants)
        return self._parts[key]

    def _places(self, c: Candidate) -> list[Place]:
        shape, tp, found = self.summary.shape, c.job.layout.tp, list[Place]()
        last = 0 if c.schedule == "zbv" else c.job.layout.pp - 1
        for rank, layers in enumerate(self._layers(c)):
            embedding, head = rank == 0, rank == last
            tables = embedding or head if shape.tied else embedding + head
            weights = layers * shape.held(tp), layers * shape.expert_weights / c.job.expert_ranks
            found.append(Place(layers, embedding, head, *weights, tables * shape.table_weights / tp))
        return found

    def _layers(self, c: Candidate) -> tuple[int, ...]:
        """Return the number of layers per pipeline rank, by the planner's own costs and balance."""
        shape, p, virtual = self.summary.shape, c.job.layout.pp, c.job.virtual
        key = (p, virtual, c.schedule)
        if key not in self._stages:
            layer = Cost(2 * shape.active_weights, shape.layer_weights).work()
            before = Cost(0, shape.table_weights).work()
            after = Cost(2 * shape.table_weights, 0 if shape.tied else shape.table_weights).work()
            counts = balance([layer] * shape.layers, p * virtual, before, after)
            back = c.schedule == "zbv"  # whose second stages lie in reverse order
            self._stages[key] = tuple(
                counts[rank] + counts[2 * p - 1 - rank] if back else sum(counts[rank::p]) for rank in range(p)
            )
        return self._stages[key]

    def _bytes(self, c: Candidate, rank: int, place: Place) -> tuple[float, float, float]:
        """Return the bytes of states, of activations, and of all that one rank needs."""
        found, shape, job, layers = self.summary, self.summary.shape, c.job, place.layers
        tp, pp, sharded = job.layout.tp, job.layout.pp, job.layout.dp_shard > 1
        on_host = found.states if "parameters" in c.offload else found.optimizer if "optimizer" in c.offload else 0.0
        states = (found.states - on_host) * job.shard_of(place.weights, place.expert_weights)
        kept, stream = self._kept(job)
        held = in_flight_of_ranks(c.schedule, pp, job.microbatches, job.virtual)[rank] / job.virtual * layers
        held = min(held, 2) if "activations" in c.offload else held
        activations = job.tokens * (held * (stream if c.recomputes else kept) + kept * c.recomputes + stream)
        width, gathered, loss = job.gathered_bytes, 0.0, 0.0
        if job.layout.data_world > 1:
            layer = shape.held(tp) + shape.expert_weights / job.expert_ranks
            whole = min(layers, 1) if pp == 1 and sharded else layers
            gathered = width * (whole * layer + place.table_weights)
        elif width < found.weight:
            gathered = 2 * (place.weights + place.expert_weights)
        if place.head:
            loss = found.head * shape.table_weights / tp + 8 * job.tokens / 4 * shape.vocabulary / tp
        return states, activations, states + activations + gathered + loss + OVERHEAD
