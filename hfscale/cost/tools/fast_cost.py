"""List all layouts for a number of GPUs and a global batch, and compute the seconds and bytes of each from a summary of
the model, fast enough to search thousands of layouts.

Seconds are computed as in :mod:`hfscale.cost.model.step_time`. Bytes are those of
:mod:`hfscale.cost.model.memory_model` for a model whose layers are all equal; a test compares both. Results that are
the same for many layouts, like the seconds of a layer or the division of layers into stages, are cached.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ..._compat.torch_device import ACCELERATOR
from ...config.parallel import AXES, ParallelConfig
from ...distributed.ops.head_cross_entropy import rows_per_chunk
from ...parallel.pipeline.microbatches import in_flight_of_ranks
from ...parallel.pipeline.stage_costs import Cost
from ...plan import balance
from ...plan.context_plan import exchange_over
from ..model.job import Job, Place
from ..model.machines_known import Constants, Machine
from ..model.memory_model import OVERHEAD, likely_bytes, most_at_once
from ..model.situation import LayerBytes
from ..model.step_time import Parts, part_seconds, stage_seconds, step_time
from .model_summary import ModelSummary

SCHEDULES = (("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2))
"""Pipeline schedules that a search tries, each with its number of stages per rank; without pipeline stages, only the
first one.
"""
WAYS = ("none", "elementwise", "full")
"""Values of ``MemoryConfig.recompute`` that a search tries."""
_LONG = 16384  # sequences with more tokens are worth sharding
_NODES_OF_TENSOR_RANKS = 2
OFFLOADS = (
    ("optimizer",),
    ("optimizer", "activations"),
    ("parameters",),
    ("parameters", "activations"),
)


@dataclass(frozen=True)
class Candidate:
    """Describe one setting that a search tries: layout, batch, recomputation and offload. Its norms are
    sequence-parallel if it is tensor-parallel.
    """

    job: Job
    offload: tuple[
        str, ...
    ] = ()  # offloaded to CPU memory: ``optimizer``, ``activations``, ``parameters``

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule; the default's name if there is only one stage."""
        return str(self.job.layout.pipeline_schedule)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of ranks per axis, innermost axis first."""
        return {axis: self.job.layout.asked(axis) for axis in reversed(AXES)}

    @property
    def recompute(self) -> str:
        """The setting's value of :attr:`hfscale.MemoryConfig.recompute`."""
        return "full" if self.job.recompute else "elementwise" if self.job.elementwise else "none"

    @property
    def levers(self) -> dict[str, Any]:
        """The options that save memory: how activations are recomputed, tokens per tile, and what is offloaded to CPU
        memory.
        """
        return {
            "recompute": self.recompute,
            "tile_tokens": self.job.tile or None,
            "offload": self.offload,
        }

    def memory_arguments(self) -> dict[str, Any]:
        """Return the arguments of :class:`hfscale.MemoryConfig` that differ from the defaults."""
        changed = {
            name: value for name, value in self.levers.items() if value not in ("none", None)
        }
        del changed["offload"]
        return changed | {f"offload_{what}": True for what in self.offload}

    @property
    def kind(self) -> str:
        """The parallel axes that have several ranks, in words, such as ``tensor x pipeline``; ``replicas`` if only
        whole models are replicated.
        """
        layout = self.job.layout
        names = [
            ("tensor", layout.tp),
            ("pipeline", layout.pp),
            ("context", layout.cp),
            ("expert", layout.ep),
        ]
        used = [
            name for name, size in [*names, ("sharded data", layout.asked("dp_shard"))] if size > 1
        ]
        return " x ".join(used) or "replicas" if layout.total_size > 1 else "one process"

    def describe(self) -> str:
        """Describe the layout, for example ``tp2 x dp_shard8 x pp4, 16 x 1 sequences, 1f1b``."""
        job = self.job
        named = (
            " x ".join(f"{axis}{size}" for axis, size in self.sizes.items() if size > 1)
            or "one process"
        )
        extra = f", {self.schedule}" if job.layout.pp > 1 else ""
        again = {"none": "", "full": ", layers recomputed"}.get(
            self.recompute, f", recompute {self.recompute}"
        )
        again += f" in tiles of {job.tile:,}" if job.tile else ""
        host = f", {' and '.join(self.offload)} on the host" if self.offload else ""
        return f"{named}, {job.microbatches} x {job.batch} sequences{extra}{again}{host}"

    def parallel_arguments(self) -> dict[str, Any]:
        """Return the arguments of :class:`hfscale.ParallelConfig` that differ from the defaults."""
        job = self.job
        arguments: dict[str, Any] = {
            f"{axis}_size": size for axis, size in self.sizes.items() if size > 1
        }
        if job.sequence_parallel:
            arguments["sequence_parallel"] = True
        if job.layout.pp > 1:
            arguments |= {"pipeline_schedule": self.schedule, "num_microbatches": job.microbatches}
            arguments |= {"virtual_stages": job.virtual} if job.virtual > 1 else {}
        return arguments

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as plain numbers and strings."""
        sizes = {axis.removeprefix("dp_"): size for axis, size in self.sizes.items()}
        step = {name: getattr(self.job, name) for name in ("batch", "microbatches", "virtual")}
        return {**sizes, **step, **self.levers, "schedule": self.schedule, "kind": self.kind}


def candidates(
    summary: ModelSummary, machine: Machine, gpus: int, sequences: int
) -> Iterator[Candidate]:
    """Yield every setting with which ``gpus`` ranks train ``sequences`` sequences per step, without offload."""
    most = _NODES_OF_TENSOR_RANKS * machine.ranks_per_node
    sequence = summary.job.sequence
    longest = 1 if sequence < _LONG else sequence // (_LONG // 4)  # most context-parallel ranks
    for tp in (size for size in _divisors(gpus) if size <= most and summary.heads % size == 0):
        for pp in (size for size in _divisors(gpus // tp) if size <= summary.shape.layers):
            for cp in (size for size in _divisors(gpus // tp // pp) if size <= longest):
                dp = gpus // tp // pp // cp
                if sequences % dp == 0:
                    yield from _of_sizes(summary, machine, (tp, pp, cp, dp), sequences // dp)


def offloading(found: Iterable[Candidate], ways: Sequence[tuple[str, ...]]) -> Iterator[Candidate]:
    """Yield each setting in ``found`` with each of the ``ways`` to offload to CPU memory, such as ``("optimizer",
    "activations")``. Settings with a pipeline schedule other than 1F1B are left out.
    """
    for candidate in found:
        for what in ways if candidate.schedule == SCHEDULES[0][0] else ():
            if "parameters" not in what or candidate.job.layout.dp_shard > 1:
                yield replace(candidate, offload=what)


def _of_sizes(
    summary: ModelSummary, machine: Machine, sizes: tuple[int, int, int, int], sequences: int
) -> Iterator[Candidate]:
    """Yield the settings with these sizes of the tensor, pipeline, context and data axes, which vary in batch size,
    schedule, expert ranks, sharding over data ranks, and recomputation.
    """
    tp, pp, cp, dp = sizes
    local = max(1, machine.ranks_per_node // (tp * cp))
    shards = sorted(
        {
            1,
            dp,
        }
        | ({local} if dp % local == 0 else set())
    )
    ep_sizes = sorted(
        {1} | {tp * size for size in _divisors(dp)} & set(_divisors(summary.shape.experts))
    )
    for batch in (size for size in _divisors(sequences) if size & (size - 1) == 0 and size <= 64):
        count = sequences // batch
        if count < pp:
            continue
        for schedule, virtual in SCHEDULES if pp > 1 else SCHEDULES[:1]:
            fits = {"interleaved1f1b": count % pp == 0, "zbv": count >= 2 * pp}.get(schedule, True)
            if not fits or pp * virtual > summary.shape.layers:
                continue
            for ep in ep_sizes:
                for shard in shards:
                    if shard % max(1, ep // tp):
                        continue
                    layout = _layout(schedule, virtual, pp, dp // shard, shard, ep, cp, tp)
                    for again, tile in _ways(summary, batch, cp, schedule):
                        yield Candidate(step_of(summary, layout, batch, count, again, tile))


def _ways(
    summary: ModelSummary,
    batch: int,
    cp: int,
    schedule: str,
) -> list[tuple[str, int]]:
    """Return the settings of recomputation to try, as pairs of ``MemoryConfig.recompute`` and tokens per tile (0: no
    tiles). Tiles are tried only if a microbatch has more than two of them.
    """
    tile = summary.job.tile
    ways = [(way, 0) for way in WAYS]
    several = tile and summary.job.sequence * batch / cp > 2 * tile
    ways += [("elementwise", tile), ("full", tile)] if several else []
    # Split backward passes would recompute layers twice.
    return [way for way in ways if way[0] != "full" or schedule != "zbv"]


@cache
def _layout(schedule: str, virtual: int, *sizes: int) -> ParallelConfig:
    """Return the layout with ``sizes``, one per mesh axis, in the order of ``AXES``."""
    named: dict[str, Any] = {f"{axis}_size": size for axis, size in zip(AXES, sizes, strict=True)}
    return ParallelConfig(**named, pipeline_schedule=schedule, virtual_stages=virtual)


def step_of(
    summary: ModelSummary,
    layout: ParallelConfig,
    batch: int,
    microbatches: int,
    recompute: str,
    tile: int = 0,
) -> Job:
    """Describe a step of the model in a layout, for estimates of its time; with tensor parallelism, norms are
    sequence-parallel.
    """
    sizes: dict[str, Any] = {"batch": batch, "microbatches": microbatches}
    sizes |= {
        "recompute": float(recompute == "full"),
        "elementwise": recompute == "elementwise" or tile > 0,
    }
    heads = summary.heads // layout.tp
    key_heads = summary.heads * summary.shape.keys / max(1, summary.shape.queries) / layout.tp
    exchange = exchange_over(layout.cp, "auto", heads, max(1, round(key_heads)))
    gathers = layout.dp_shard > 1 and layout.pp == 1
    return replace(
        summary.job,
        layout=layout,
        gathers=gathers,
        sequence_parallel=layout.tp > 1,
        exchange=exchange,
        tile=tile,
        **sizes,
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class CandidateCost:
    """Hold the estimated seconds of one setting of a search, and the bytes of the pipeline rank with the most
    memory.
    """

    candidate: Candidate
    seconds: float  # seconds per step
    needed: float  # bytes that the rank needs to run
    likely: float  # bytes that the rank is likely to reserve
    states: float  # bytes of weights, gradients and optimizer
    activations: float  # bytes kept for backward passes

    @property
    def mostly(self) -> str:
        """Which bytes of the rank are more, in words: those of weights, gradients and optimizer, or those of
        activations.
        """
        return (
            "weights, gradients and optimizer" if self.states > self.activations else "activations"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return layout, seconds and bytes as plain numbers and words."""
        return {
            **self.candidate.to_dict(),
            "seconds": self.seconds,
            "needed": self.needed,
            "likely": self.likely,
        }


class FastCost:
    """Estimate the seconds and bytes of the settings that a search tries, for one model and one kind of machine."""

    def __init__(self, summary: ModelSummary, machine: Machine, constants: Constants) -> None:
        self.summary = summary
        self.machine = machine
        self.constants = constants
        self._parts: dict[tuple[float, ...], Parts] = {}
        self._layers = cache(self._balanced)

    def estimate(self, candidate: Candidate) -> CandidateCost:
        """Estimate the seconds of a step with this setting, and the bytes of the pipeline rank with the most memory."""
        job = candidate.job
        places = self._rank_contents(candidate)
        stages = stage_seconds(places, self._seconds(job))
        # In zbv, ranks wait only for a forward pass of half of a rank's layers.
        parts = 6 if candidate.schedule == "zbv" else None
        layer = self._layer_bytes(job)
        if candidate.offload:
            layers = max(place.layers for place in places)
            one = layer.stream if job.recompute else layer.kept
            activations = 2 * job.tokens * job.microbatches * layers * one
            own = max(job.shard_of(place.weights, place.expert_weights) for place in places)
            job = job.with_host(candidate.offload, activations, own)
        weights = [place.weights for place in places]
        experts = [place.expert_weights for place in places]
        time = step_time(
            stages, weights, job, self.machine, self.constants, experts=experts, parts=parts
        )
        in_flight = in_flight_of_ranks(
            candidate.schedule, job.layout.pp, job.microbatches, job.virtual
        )
        held = (
            self._bytes(candidate, place, layer, count / job.virtual * place.layers)
            for place, count in zip(places, in_flight, strict=True)
        )
        states, activations, needed = max(held, key=lambda rank: rank[2])
        return CandidateCost(
            candidate, time.total, needed, likely_bytes(needed, activations), states, activations
        )

    def _layer_bytes(self, job: Job) -> LayerBytes:
        """Return the activation bytes per token of one layer on one rank."""
        summary = self.summary
        layout = job.layout
        tp = layout.tp
        place = "spread" if layout.ep > 1 else "alone" if layout.data_world == 1 else "data"
        way = "tiles" if job.tile else "elementwise" if job.elementwise else "none"
        kept = summary.kept[place, way]
        whole = kept.over(tp)
        tiles = 0.0
        # An MLP keeps all activations of one tile; the summary divides these bytes by all tokens of a sequence.
        if job.tile:
            width = 2 * job.value_bytes * summary.shape.mlp_width
            tiles = width * job.tile * (1 / job.tokens - 1 / job.sequence)
        # Attention's result is kept once more for this rank's tokens, and shared key heads on each rank that reads
        # them.
        if job.exchange.moves_heads:
            more = summary.shape.queries + 2 * (job.exchange.replicas - 1) * summary.shape.keys
            whole += job.value_bytes * more / tp
        again = whole * (job.recompute > 0) + (kept.again + 2 * tiles) / tp
        passing = (kept.passing + tiles) / tp
        return LayerBytes(whole, summary.stream / tp, True, again, passing=passing)

    def _seconds(self, job: Job) -> Parts:
        layout = job.layout
        key = (layout.tp, layout.cp, layout.ep, job.batch, job.recompute, job.elementwise, job.tile)
        if key not in self._parts:
            self._parts[key] = part_seconds(self.summary.shape, job, self.machine, self.constants)
        return self._parts[key]

    def _rank_contents(self, c: Candidate) -> list[Place]:
        shape = self.summary.shape
        tp = c.job.layout.tp
        places = list[Place]()
        last = 0 if c.schedule == "zbv" else c.job.layout.pp - 1
        for rank, layers in enumerate(
            self._layers(c.job.layout.pp, c.job.virtual, c.schedule == "zbv")
        ):
            embedding = rank == 0
            head = rank == last
            tables = embedding or head if shape.tied else embedding + head
            weights = layers * shape.held(tp), layers * shape.expert_weights / c.job.expert_ranks
            places.append(
                Place(layers, embedding, head, *weights, tables * shape.table_weights / tp)
            )
        return places

    def _balanced(self, p: int, virtual: int, back: bool) -> list[int]:
        """Return the number of layers on each of ``p`` pipeline ranks, balanced by the planner's costs of layers,
        embedding and head. With ``back``, each rank has two stages, and the second ones are placed in reverse order of
        the ranks.
        """
        shape = self.summary.shape
        layer = Cost(2 * shape.active_weights, shape.layer_weights).work()
        before = Cost(0, shape.table_weights).work()
        after = Cost(2 * shape.table_weights, 0 if shape.tied else shape.table_weights).work()
        counts = balance([layer] * shape.layers, p * virtual, before, after)
        return [
            counts[rank] + counts[2 * p - 1 - rank] if back else sum(counts[rank::p])
            for rank in range(p)
        ]

    def _bytes(
        self,
        c: Candidate,
        place: Place,
        layer: LayerBytes,
        held: float,
    ) -> tuple[float, float, float]:
        """Return three numbers of bytes of one pipeline rank: weights, gradients and optimizer state; activations; and
        all bytes that the rank needs at its peak. ``held`` counts the activations that wait at once: of one ``layer``
        and microbatch each.
        """
        summary = self.summary
        shape = self.summary.shape
        job = c.job
        tp = job.layout.tp
        on_host = (
            summary.states
            if "parameters" in c.offload
            else summary.optimizer
            if "optimizer" in c.offload
            else 0.0
        )
        entries = job.shard_of(place.weights, place.expert_weights)
        states = (summary.states - on_host) * entries
        held = min(held, 2) if "activations" in c.offload else held
        one = job.tokens * (layer.stream if job.recompute else layer.kept)
        behind = job.tokens * layer.stream
        activations = one * held + job.tokens * layer.again + behind
        running = job.tokens * (layer.again + layer.passing)
        whole = place.weights + place.expert_weights
        gathered = summary.gathered(job, place.layers, whole, place.table_weights, c.offload)
        loss = 0.0
        if place.head:
            rows = rows_per_chunk(
                round(job.tokens), round(shape.vocabulary / tp), torch.device(ACCELERATOR)
            )
            loss = (
                summary.head * shape.table_weights / tp
                + job.value_bytes * rows * shape.vocabulary / tp
            )
        values = job.value_bytes / tp  # bytes per value on one tensor-parallel rank
        exchanged = job.exchange.held(
            2 * values * shape.keys, values * shape.queries, job.sequence * job.batch, job.tokens
        )
        gradients = 0.0
        # With one microbatch, gradients are created while activations are freed.
        if job.microbatches == 1 and "parameters" not in c.offload:
            gradients = job.gradient_bytes * job.trained * entries
        first = one * min(held, 2 if "activations" in c.offload else 1) + running
        most = most_at_once(one * held, behind + loss, running, first, gradients)
        needed = states - gradients + most + gathered + exchanged + OVERHEAD
        return states, activations, needed
