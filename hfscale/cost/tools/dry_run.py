"""Count the bytes that ranks send and keep in one step, without weights, processes or GPUs, and compare them with the
estimate.

Pipeline ranks with the same numbers of layers, embeddings and heads are simulated once. The training code builds such a
rank on the meta device, as one of all ranks of the layout over torch's fake process group (:mod:`.simulated_rank`), and
runs a step. The bytes that the rank passes to collectives, and those that it keeps for backward passes, are counted.
"""

import gc
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedConfig

from ...api.build import plan as make_plan
from ...config.parallel import ParallelConfig
from ...errors import check_count
from ...features.memory.saved import SavedBytes, SavedCounter
from ...plan import Plan
from ...plan.columns import aligned
from ...plan.table import human
from ..model.job import Place, places_of
from ..model.traffic import Traffic, rank_traffic
from .estimate import costs
from .simulated_rank import SimulatedTraffic, meta_model, run_spec, take_step

# Counted axis -> the axis under which an estimate lists the bytes, because experts have their own data axes.
_NAMES = {"stages": "pp", "edp_shard": "dp_shard", "edp_replicate": "dp_replicate"}
_BESIDE = ("host", "pp", "ties", "others")  # counts of the step that estimates leave out


@dataclass(frozen=True)
class Compared:
    """Compare counted with estimated bytes: those that a rank sends in a step over one axis, or those that it keeps for
    the backward pass.
    """

    axis: str  # axis of the layout; ``pp``: hidden states between stages
    calls: int  # number of collectives
    counted: float  # counted bytes of the step
    estimated: float  # estimated bytes of the step

    @property
    def ratio(self) -> float:
        """The estimated bytes divided by the counted bytes; 1 if both are 0."""
        return 1.0 if self.counted == self.estimated else self.estimated / max(self.counted, 1e-9)


@dataclass(frozen=True)
class StageRun:
    """Hold the bytes that one pipeline rank sends and keeps in a simulated step, counted and estimated."""

    rank: int
    like: tuple[int, ...]  # ranks with the same contents
    layers: int
    traffic: tuple[Compared, ...]  # bytes sent, by axis
    # The most bytes kept at once for backward passes, without recomputed ones.
    activations: Compared
    # Bytes that estimates leave out: messages between hosts, scalars, and gradients of tied weights between stages.
    beside: Mapping[str, float]

    @property
    def compared(self) -> list[Compared]:
        """All comparisons of counted with estimated bytes: those sent, by axis, then those of activations."""
        return [*self.traffic, self.activations]


@dataclass(frozen=True)
class DryRun:
    """Hold the result of a dry run: bytes that pipeline ranks send and keep in a step. ``print`` it for a table."""

    layout: str
    ranks: int
    microbatches: int
    tokens: int
    stages: tuple[StageRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain numbers and strings."""
        document = asdict(self)
        for stage, run in zip(document["stages"], self.stages, strict=True):
            rows = [
                {**asdict(comparison), "ratio": comparison.ratio} for comparison in run.compared
            ]
            stage["traffic"], stage["activations"] = rows[:-1], rows[-1]
        return document

    def __str__(self) -> str:
        head = (
            f"{self.layout}: {self.ranks:,} ranks, {self.microbatches} microbatches of {self.tokens:,} tokens; "
            "bytes of a step and rank"
        )
        rows = [("stage", "layers", "of", "calls", "counted", "estimated", "ratio")]
        for stage in self.stages:
            for comparison in stage.compared:
                calls = f"{comparison.calls:,}" if comparison.calls else ""
                sizes = (
                    human(round(comparison.counted)),
                    human(round(comparison.estimated)),
                    f"{comparison.ratio:.3f}",
                )
                rows.append((str(stage.rank), str(stage.layers), comparison.axis, calls, *sizes))
        alike = [
            f"stage {run.rank} is like {_ranges(run.like)}"
            for run in self.stages
            if len(run.like) > 1
        ]
        return "\n".join([head, *aligned(rows, left=()), *alike])


def dry_run(
    config: PreTrainedConfig,
    parallel: ParallelConfig,
    *,
    sequence_length: int = 4096,
    batch_size: int = 1,  # sequences per microbatch
    num_microbatches: int
    | None = None,  # per batch rank and step; default: the layout's, or one per stage
    mixed_precision: str = "no",
    progress: bool = False,  # whether to show a progress bar in a terminal
    **given: Any,  # arguments of hfscale.plan
) -> DryRun:
    """Run a step on the meta device, for one of each group of pipeline ranks with the same contents, and count the
    bytes that it sends and keeps. ``given`` are arguments of :func:`hfscale.plan`.
    """
    check_count("sequence_length", sequence_length)
    check_count("batch_size", batch_size)
    plan = make_plan(config, parallel, mixed_precision=mixed_precision, **given)
    spec = run_spec(config, mixed_precision=mixed_precision, **given)
    shape, job, held = costs(
        plan, spec, sequence_length, batch_size, num_microbatches, mixed_precision
    )
    runs = list[StageRun]()
    places = places_of(plan)
    world = plan.layout.total_size
    hidden = None if progress else True
    for like in tqdm(
        _kinds(plan, places), "stages", disable=hidden, bar_format="{l_bar}{bar}| {elapsed}"
    ):
        rank = like[0]
        saved = SavedBytes()
        with meta_model(
            spec,
            plan.layout,
            rank * (world // plan.layout.pp),
        ) as (model, copies):
            counter = SavedCounter(model, plan.layers, plan.head, saved.add, copies)
            sent = take_step(model, job, shape, counter, mixed_precision)
            del model, counter
        gc.collect()
        estimated = held[rank].activations - held[rank].again
        kept = Compared("activations", 0, saved.layers + saved.around, estimated)
        traffic = _compared(sent, rank_traffic(shape, job, places[rank]))
        beside = {axis: size for axis, size in sent.sent.items() if axis in _BESIDE}
        runs.append(StageRun(rank, like, places[rank].layers, traffic, kept, beside))
    return DryRun(
        plan.layout.describe(), world, job.microbatches, sequence_length * batch_size, tuple(runs)
    )


def _kinds(plan: Plan, places: list[Place]) -> list[tuple[int, ...]]:
    """Group the pipeline ranks that have equal numbers of layers in their stages, of embeddings, heads and neighbors.
    The dry run simulates the first rank of each group.
    """
    kinds: dict[Any, list[int]] = {}
    for rank, place in enumerate(places):
        own = (
            ()
            if plan.stages is None
            else tuple(len(stage.layers) for stage in plan.stages.of_rank(rank))
        )
        kinds.setdefault(
            (own, place.embedding, place.head, place.forward, place.backward), []
        ).append(rank)
    return [tuple(ranks) for ranks in kinds.values()]


def _compared(counted: SimulatedTraffic, estimated: Traffic) -> tuple[Compared, ...]:
    """Pair the counted with the estimated bytes of each axis, without axes over which nothing is sent."""
    sent = defaultdict[str, float](float)
    calls = Counter[str]()
    for axis in counted.calls.keys() - set(_BESIDE):
        sent[_NAMES.get(axis, axis)] += counted.sent[axis]
        calls[_NAMES.get(axis, axis)] += counted.calls[axis].total()
    rows = (
        Compared(axis, calls[axis], sent[axis], size) for axis, size in asdict(estimated).items()
    )
    return tuple(row for row in rows if row.calls or row.estimated)


def _ranges(numbers: tuple[int, ...]) -> str:
    """Format integers as ranges: ``(1, 2, 3, 5)`` -> ``1-3, 5``."""
    ranges = list[list[int]]()
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, pair)) for pair in ranges)
