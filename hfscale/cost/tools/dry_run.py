"""A step of every kind of pipeline rank, run without weights, processes or GPUs, beside what the estimate says of it.

One rank for each kind of stage is built by the code that trains, on the meta device, as one of all ranks of the layout
over torch's fake process group (:mod:`.simulated_rank`), and takes a step. What it hands to collectives, and
what it keeps for its backward passes, is counted.
"""

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig

from ...build import plan as make_plan
from ...config import ParallelConfig
from ...errors import check_count
from ...memory.saved import SavedBytes, SavedCounter
from ...plan import Plan
from ...plan.recompute import recomputed
from ...plan.table import aligned, human
from ..model.job import Place, places_of
from ..model.traffic import rank_traffic
from .estimate import costs
from .meta_model import meta_model, run_spec, take_step

# Of what is counted, the name in an estimate: experts have data axes of their own.
_NAMES = {"stages": "pp", "edp_shard": "dp_shard", "edp_replicate": "dp_replicate"}
_AXES = ("tp", "ep", "cp", "pp", "dp_shard", "dp_replicate")
_BESIDE = ("host", "pp", "ties", "others")  # numbers of the step, and what estimates leave out
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Compared:
    """Bytes that a rank sends over one axis in a step, or keeps."""

    axis: str  # of the layout; ``pp`` is the stream between stages
    calls: int  # collectives
    counted: float  # bytes of the step
    estimated: float  # those that the estimate is made of

    @property
    def ratio(self) -> float:
        """The estimate over what was counted; 1 where there is neither."""
        return 1.0 if self.counted == self.estimated else self.estimated / max(self.counted, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain numbers and words."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True)
class StageRun:
    """The step of one pipeline rank."""

    rank: int
    like: tuple[int, ...]  # ranks that have the same
    layers: int
    traffic: tuple[Compared, ...]  # axis by axis
    activations: Compared | None  # the most kept at once for backward passes; none where that is computed again
    beside: Mapping[str, float]  # bytes that estimates leave out: words between hosts, numbers, ties between stages


@dataclass(frozen=True)
class DryRun:
    """What was counted. ``print`` it for a table."""

    layout: str
    ranks: int
    microbatches: int
    tokens: int
    stages: tuple[StageRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain numbers and words."""
        found = asdict(self)
        for stage, run in zip(found["stages"], self.stages, strict=True):
            stage["traffic"] = [each.to_dict() for each in run.traffic]
            stage["activations"] = run.activations and run.activations.to_dict()
        return found

    def __str__(self) -> str:
        head = (
            f"{self.layout}: {self.ranks:,} ranks, {self.microbatches} microbatches of {self.tokens:,} tokens; "
            "bytes of a step and rank"
        )
        rows = [("stage", "layers", "of", "calls", "counted", "estimated", "ratio")]
        for stage in self.stages:
            for each in (*stage.traffic, *([stage.activations] if stage.activations else [])):
                calls = f"{each.calls:,}" if each.calls else ""
                sizes = (human(round(each.counted)), human(round(each.estimated)), f"{each.ratio:.3f}")
                rows.append((str(stage.rank), str(stage.layers), each.axis, calls, *sizes))
        alike = [f"stage {run.rank} is like {_ranges(run.like)}" for run in self.stages if len(run.like) > 1]
        return "\n".join([head, *aligned(rows, left=()), *alike])


def dry_run(
    config: PreTrainedConfig,
    parallel: ParallelConfig,
    *,
    sequence_length: int = 4096,
    batch_size: int = 1,
    num_microbatches: int | None = None,
    mixed_precision: str = "no",
    dtype: Any = None,
    progress: Progress | None = None,
    **given: Any,
) -> DryRun:
    """Build one rank of every kind of stage on the meta device, and let it take a step.

    Args:
        config: of the model.
        parallel: the layout, of any number of ranks.
        sequence_length: tokens of a sequence; ``batch_size`` sequences are a microbatch.
        num_microbatches: of one batch rank in a step; by default the layout's, or as many as there are stages.
        mixed_precision: ``"no"`` or ``"bf16"``.
        dtype: of the weights; by default the config's.
        progress: told what is under way, its number, and of how many.
        given: to :func:`hfscale.plan`: ``memory``, ``peft_config``, ``auto_class``, ...

    Raises:
        ConfigError: sizes are impossible.
        PlanError: the layout does not fit the model.
    """
    check_count("sequence_length", sequence_length)
    check_count("batch_size", batch_size)
    (say := progress or (lambda what, number, of: None))("planning", 0, 1)
    given |= {} if dtype is None else {"dtype": dtype}
    plan = make_plan(config, parallel, **given)
    spec = run_spec(config, mixed_precision=mixed_precision, **given)
    shape, job, held = costs(plan, spec, sequence_length, batch_size, num_microbatches, mixed_precision)
    runs, places, world = [], places_of(plan, job), plan.layout.total_size
    kinds, again = _kinds(plan, places), recomputed(plan)
    for number, like in enumerate(kinds):
        rank = like[0]
        say(f"stage {rank}", number + 1, len(kinds) + 1)
        saved = SavedBytes()
        with meta_model(spec, plan.layout, rank * (world // plan.layout.pp)) as (model, copies):
            counter = SavedCounter(model, plan.layers, plan.head, saved.add, copies)
            sent = take_step(model, job, shape, counter, mixed_precision)
            del model, counter
        gc.collect()
        kept = None if again.layers or again.modules else saved.layers + saved.around
        runs.append(_compared(like, places[rank], sent, kept, rank_traffic(shape, job, places[rank]), held[rank]))
    return DryRun(plan.layout.describe(), world, job.microbatches, sequence_length * batch_size, tuple(runs))


def _kinds(plan: Plan, places: list[Place]) -> list[tuple[int, ...]]:
    """Return pipeline ranks that have the same, the first of each kind being the one that is run."""
    found: dict[Any, list[int]] = {}
    for rank, place in enumerate(places):
        own = () if plan.stages is None else tuple(len(stage.layers) for stage in plan.stages.of_rank(rank))
        found.setdefault((own, place.embedding, place.head, place.forward, place.backward), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _compared(
    like: tuple[int, ...], place: Place, counted: Any, saved: int | None, estimated: dict[str, float], held: Any
) -> StageRun:
    sent, calls = Counter[str](), Counter[str]()
    for axis in counted.calls.keys() - set(_BESIDE):
        sent[_NAMES.get(axis, axis)] += counted.sent[axis]
        calls[_NAMES.get(axis, axis)] += counted.calls[axis].total()
    axes = [axis for axis in _AXES if axis in {**estimated, **sent}]
    return StageRun(
        rank=like[0],
        like=like,
        layers=place.layers,
        traffic=tuple(Compared(a, calls[a], sent[a], estimated.get(a, 0.0)) for a in axes),
        activations=None if saved is None else Compared("activations", 0, saved, held.activations),
        beside={axis: size for axis, size in counted.sent.items() if axis in _BESIDE},
    )


def _ranges(numbers: tuple[int, ...]) -> str:
    """``(1, 2, 3, 5)`` -> ``1-3, 5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, pair)) for pair in found)
