"""A step of every kind of pipeline rank, run without weights, processes or GPUs, beside what the estimate says of it.

One rank for each kind of stage is built by the code that trains, on the meta device, as one of all ranks of the layout
over torch's fake process group (:mod:`.pretend`), and takes a step. What it hands to collectives, and what it keeps for
its backward passes, is counted.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .._host.transformers.classes import from_config as stock_from_config
from ..build import from_config, parallelize
from ..build import plan as make_plan
from ..config import ParallelConfig
from ..errors import ConfigError
from ..estimate.job import Job
from ..estimate.machine import find_machine
from ..estimate.model_shape import ModelShape
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
from .pretend import Answer, Pretence, fused_attention, leave_alone, pretended_rank
from .shapes import shape_of_plan

# Of what is counted, the name in an estimate: experts have data axes of their own.
_NAMES = {"stages": "pp", "edp_shard": "dp_shard", "edp_replicate": "dp_replicate"}
_AXES = ("tp", "ep", "cp", "pp", "dp_shard", "dp_replicate")
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
    peft_config: Any = None,
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
        peft_config: of adapters that train instead of the weights.
        progress: told what is under way, its number, and of how many.

    Raises:
        ConfigError: sizes are impossible.
        PlanError: the layout does not fit the model.
    """
    _check_sizes(sequence_length=sequence_length, batch_size=batch_size)
    say = progress or (lambda what, number, of: None)
    say("planning", 0, 1)
    given = {"auto_class": auto_class, "memory": memory, "peft_config": peft_config, **kwargs}
    given |= {} if dtype is None else {"dtype": dtype}
    plan = make_plan(config, parallel, **given)
    count = num_microbatches or plan.layout.num_microbatches or plan.layout.size("pp")
    shape, mixed = shape_of_plan(plan, config), mixed_precision != "no"
    sizes: dict[str, int] = {"sequence": sequence_length, "batch": batch_size, "microbatches": count}
    job = job_of(plan, find_machine("h100"), **sizes, mixed=mixed)
    tokens, routes = sequence_length * batch_size, shape.routed or None
    numbers: dict[str, Any] = {"num_microbatches": count, "mixed_precision": mixed_precision, "routes": routes}
    held = memory_of_ranks(plan, tokens=tokens, **numbers)
    runs, places, world = [], places_of(plan, job), plan.layout.total_size
    kinds = _kinds(plan, places)
    for number, like in enumerate(kinds):
        rank = like[0]
        say(f"stage {rank}", number + 1, len(kinds) + 1)
        with pretended_rank(world, rank * (world // plan.layout.size("pp"))), _quiet():
            model = _built(config, parallel, mixed_precision, **given).train()
            stream = torch.bfloat16 if mixed else _stream_type(model)
            counted, saved = _step(model, sizes, stream, partial(_found, job, shape))
        del model
        gc.collect()
        runs.append(_compared(like, places[rank], counted, saved, rank_traffic(shape, job, places[rank]), held[rank]))
    return DryRun(plan.layout.describe(), world, count, tokens, tuple(runs))


def _built(
    config: PreTrainedConfig,
    parallel: ParallelConfig,
    mixed_precision: str,
    *,
    auto_class: Any,
    memory: MemoryConfig | None,
    peft_config: Any,
    **given: Any,
) -> Any:
    """The rank's model. Adapters need one that is made layer by layer, and takes the memory of a whole layer."""
    if peft_config is not None:
        chosen = {"memory": memory, "peft_config": peft_config, "mixed_precision": mixed_precision, **given}
        return from_config(config, parallel=parallel, auto_class=auto_class, **chosen)
    with torch.device("meta"):
        model = stock_from_config(auto_class, config, **given)
    return parallelize(model, parallel, memory=memory, mixed_precision=mixed_precision)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}={value} is impossible: use a whole number of at least 1")


def _kinds(plan: Plan, places: list[Place]) -> list[tuple[int, ...]]:
    """Pipeline ranks that have the same, the first of each kind being the one that is run."""
    found: dict[Any, list[int]] = {}
    for rank, place in enumerate(places):
        own = () if plan.stages is None else tuple(len(stage.layers) for stage in plan.stages.of_rank(rank))
        found.setdefault((own, place.embedding, place.head, place.forward, place.backward), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _stream_type(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _found(job: Job, shape: ModelShape, looked_at: Tensor) -> Tensor:
    """What the host finds on the device: zeros, or routes ``[2, ranks, experts]`` that are the same for every expert.

    Whoever has all experts of its tensor ranks has all of a batch's tokens, and whoever sends them to others its share.
    """
    found = torch.zeros(looked_at.shape, dtype=looked_at.dtype)
    if not (shape.experts and looked_at.ndim == 3 and len(looked_at) == 2):
        return found
    spread = job.slices_tokens and found[0].numel() == shape.experts
    routes = round(job.tokens / (job.tp if spread else 1) * shape.routed * found[0].numel() / shape.experts)
    each, rest = divmod(routes, found[0].numel())
    found[0] = each + (torch.arange(found[0].numel()) < rest).view_as(found[0])
    found[1] = found[0, :1]  # of rank 0: every other sends it as much as it keeps for itself
    return found


def _step(model: Any, sizes: dict[str, int], stream: torch.dtype, found: Answer) -> tuple[Any, int | None]:
    runtime = runtime_of(model)
    leave_alone(runtime, stream)
    shape = sizes["batch"], sizes["sequence"]
    ids = [torch.zeros(shape, dtype=torch.int64) for _ in range(sizes["microbatches"])]
    pretence = Pretence(runtime, found)
    with pretence, fused_attention(), count_saved(model, runtime.plan.layers, runtime.plan.head) as saved:
        train_step(model, [{"input_ids": one, "labels": one} for one in ids])
    again = recomputed(runtime.plan)
    return pretence.traffic, None if again.layers or again.modules else saved.layers + saved.around


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
