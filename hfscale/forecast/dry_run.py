"""A step of every kind of pipeline rank, run without weights, processes or GPUs, beside what the estimate says of it.

One rank for each kind of stage is built by the code that trains, on the meta device, as one of all ranks of the layout
over torch's fake process group (:mod:`.pretend`), and takes a step. What it hands to collectives, and what it keeps for
its backward passes, is counted.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .._host.transformers.classes import from_config as stock_from_config
from ..build import parallelize
from ..build import plan as make_plan
from ..config import ParallelConfig
from ..errors import ConfigError
from ..estimate.machine import find_machine
from ..estimate.traffic import Place, rank_traffic
from ..memory.report import count_saved, memory_of_ranks
from ..memory_config import MemoryConfig
from ..plan import Plan
from ..plan.recompute import recomputed
from ..plan.table import human
from ..runtime import runtime_of
from ..train import train_step
from .jobs import job_of
from .places import places_of
from .pretend import Pretence, fused_attention, leave_alone, pretended_rank
from .shapes import shape_of_plan

_STAGES = {"stages": "pp"}  # of what is counted, the name in an estimate
_BESIDE = ("host", "pp", "ties", "others")  # numbers of the step, and what estimates leave out
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Compared:
    """Bytes that a rank sends over one axis in a step, or keeps.

    Attributes:
        axis: of the layout; ``pp`` is the stream between stages.
        calls: collectives.
        counted: bytes that the step sends; ``estimated``: those that the estimate is made of.
    """

    axis: str
    calls: int
    counted: float
    estimated: float

    @property
    def ratio(self) -> float:
        """The estimate over what was counted; 1 where there is neither."""
        return 1.0 if self.counted == self.estimated else self.estimated / max(self.counted, 1e-9)


@dataclass(frozen=True)
class StageRun:
    """The step of one pipeline rank.

    Attributes:
        rank: pipeline rank; ``like``: those that have the same.
        layers: how many it has.
        traffic: axis by axis.
        activations: the most bytes that its layers, and the last norm, kept at once for backward passes; none where
            layers are recomputed, which is out of sight.
        beside: bytes of what estimates leave out, by kind: words between hosts, sums of numbers, ties between stages.
    """

    rank: int
    like: tuple[int, ...]
    layers: int
    traffic: tuple[Compared, ...]
    activations: Compared | None
    beside: Mapping[str, float]


@dataclass(frozen=True)
class DryRun:
    """What was counted. ``print`` it for a table."""

    layout: str
    ranks: int
    microbatches: int
    tokens: int
    stages: tuple[StageRun, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers and words."""

        def row(each: Compared) -> dict[str, Any]:
            return {**asdict(each), "ratio": each.ratio}

        found = asdict(self)
        for stage, run in zip(found["stages"], self.stages, strict=True):
            stage["traffic"] = [row(each) for each in run.traffic]
            stage["activations"] = row(run.activations) if run.activations else None
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
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        alike = [f"stage {run.rank} is like {_ranges(run.like)}" for run in self.stages if len(run.like) > 1]
        return "\n".join([head, *lines, *alike])


def dry_run(
    config: PreTrainedConfig,
    parallel: ParallelConfig,
    *,
    sequence_length: int = 4096,
    batch_size: int = 1,
    num_microbatches: int | None = None,
    mixed_precision: str = "no",
    dtype: Any = None,
    memory: MemoryConfig | None = None,
    auto_class: Any = AutoModelForCausalLM,
    progress: Progress | None = None,
    **kwargs: Any,
) -> DryRun:
    """Build one rank of every kind of stage on the meta device, and let it take a step.

    Args:
        config: of the model.
        parallel: the layout, of any number of ranks.
        sequence_length: tokens of a sequence; ``batch_size`` sequences are a microbatch.
        num_microbatches: of one batch rank in a step; by default the layout's, or as many as there are stages.
        mixed_precision: ``"no"`` or ``"bf16"``.
        dtype: of the weights; by default the config's.
        memory: what is computed again or kept on the host.
        progress: told what is under way, its number, and of how many.

    Raises:
        ConfigError: the model is a mixture, whose routing needs numbers, or sizes are impossible.
        PlanError: the layout does not fit the model.
    """
    for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{name}={value} is impossible: use a whole number of at least 1")
    say = progress or (lambda what, number, of: None)
    say("planning", 0, 1)
    plan = make_plan(config, parallel, auto_class=auto_class, dtype=dtype, memory=memory, **kwargs)
    if plan.mixtures:
        raise ConfigError(
            f"a dry run computes no numbers, and a {plan.family!r} model sends tokens where its router says: use "
            "hfscale estimate, or a dry run of a dense model"
        )
    count = num_microbatches or plan.layout.num_microbatches or plan.layout.size("pp")
    shape, mixed = shape_of_plan(plan, config), mixed_precision != "no"
    sizes: dict[str, int] = {"sequence": sequence_length, "batch": batch_size, "microbatches": count}
    job = job_of(plan, find_machine("h100"), **sizes, mixed=mixed)
    held = memory_of_ranks(
        plan, tokens=sequence_length * batch_size, num_microbatches=count, mixed_precision=mixed_precision
    )
    runs, places, world = [], places_of(plan, shape, job), plan.layout.total_size
    kinds = _kinds(plan, places)
    for number, like in enumerate(kinds):
        rank = like[0]
        say(f"stage {rank}", number + 1, len(kinds) + 1)
        with pretended_rank(world, rank * (world // plan.layout.size("pp"))), _quiet():
            model = _built(config, parallel, auto_class, dtype, memory, mixed_precision, kwargs)
            counted, saved = _step(model, sizes, torch.bfloat16 if mixed else _stream_type(model))
        del model
        gc.collect()
        runs.append(_compared(like, places[rank], counted, saved, rank_traffic(shape, job, places[rank]), held[rank]))
    return DryRun(plan.layout.describe(), plan.layout.total_size, count, sequence_length * batch_size, tuple(runs))


def _kinds(plan: Plan, places: list[Place]) -> list[tuple[int, ...]]:
    """Pipeline ranks that have the same, the first of each kind being the one that is run."""
    found: dict[Any, list[int]] = {}
    for rank, place in enumerate(places):
        own = () if plan.stages is None else tuple(len(stage.layers) for stage in plan.stages.of_rank(rank))
        found.setdefault((own, place.embedding, place.head, place.forward, place.backward), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _built(
    config: PreTrainedConfig,
    parallel: ParallelConfig,
    auto_class: Any,
    dtype: Any,
    memory: MemoryConfig | None,
    mixed_precision: str,
    kwargs: dict[str, Any],
) -> Any:
    given = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        model = stock_from_config(auto_class, config, **given, **kwargs)
    return parallelize(model, parallel, memory=memory, mixed_precision=mixed_precision).train()


def _stream_type(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _step(model: Any, sizes: dict[str, int], stream: torch.dtype) -> tuple[Any, int | None]:
    runtime = runtime_of(model)
    leave_alone(runtime, stream)
    shape = sizes["batch"], sizes["sequence"]
    ids = [torch.zeros(shape, dtype=torch.int64) for _ in range(sizes["microbatches"])]
    pretence = Pretence(runtime, lambda found: torch.zeros(found.shape, dtype=found.dtype))
    with pretence, fused_attention(), count_saved(model, runtime.plan.layers, runtime.plan.head) as saved:
        train_step(model, [{"input_ids": one, "labels": one} for one in ids])
    again = recomputed(runtime.plan)
    return pretence.traffic, None if again.layers or again.modules else saved.layers + saved.around


def _compared(
    like: tuple[int, ...], place: Place, counted: Any, saved: int | None, estimated: dict[str, float], held: Any
) -> StageRun:
    sent = {_STAGES.get(axis, axis): size for axis, size in counted.sent.items() if axis not in _BESIDE}
    calls = {_STAGES.get(axis, axis): found.total() for axis, found in counted.calls.items() if axis not in _BESIDE}
    axes = [axis for axis in ("tp", "cp", "pp", "dp_shard", "dp_replicate") if axis in {**estimated, **sent}]
    return StageRun(
        rank=like[0],
        like=like,
        layers=place.layers,
        traffic=tuple(Compared(a, calls.get(a, 0), sent.get(a, 0.0), estimated.get(a, 0.0)) for a in axes),
        activations=None if saved is None else Compared("activations", 0, saved, held.activations),
        beside={axis: size for axis, size in counted.sent.items() if axis in _BESIDE},
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings about a run that nobody starts are not shown."""
    logger = logging.getLogger("hfscale")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _ranges(numbers: tuple[int, ...]) -> str:
    """``(1, 2, 3, 5)`` -> ``1-3, 5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, pair)) for pair in found)
