"""Estimate the seconds and bytes of a model in a layout: :func:`estimate`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from transformers import PreTrainedConfig

from ...api.arguments import load_config
from ...api.build import plan as make_plan
from ...config.parallel import ParallelConfig
from ...errors import ConfigError, check_count
from ...parallel.pipeline.orders import order
from ...parallel.pipeline.simulation import Costs, simulate
from ...parallel.pipeline.timeline import Timeline
from ...plan import Plan
from ...plan.columns import aligned
from ...plan.table import human
from ..model.job import Job, job_of, places_of, with_host_of
from ..model.machines_known import Constants, Machine, constants_of, evidence, find_machine
from ..model.memory_model import MemoryEstimate
from ..model.model_shape import ModelShape, shape_of_plan
from ..model.step_time import StepTime, part_seconds, stage_seconds, step_time
from .measure_layers import measured_layers
from .memory_report import check_asked, memory_of_ranks
from .simulated_rank import RunSpec, run_spec

_MOST_ACTIONS = 100_000  # most actions to simulate; larger schedules use a formula


@dataclass(frozen=True)
class StageEstimate:
    """Hold the estimate of one pipeline rank: its layers, its seconds per microbatch, and its memory."""

    rank: int
    layers: int
    seconds: float  # seconds of a microbatch's forward and backward pass
    memory: MemoryEstimate


@dataclass(frozen=True)
class Estimate:
    """Hold the estimated seconds of a training step and the bytes of each pipeline rank. ``print`` it for a table."""

    hardware: Machine
    layout: str  # description of the layout
    stages: tuple[StageEstimate, ...]  # layers, seconds and memory of each pipeline rank
    time: StepTime  # seconds of the step, by term
    tokens: int  # tokens of the step, over all ranks
    ranks: int  # number of ranks
    flops: float  # of the step over all ranks: 6 per token and weight, plus attention
    notes: tuple[str, ...] = ()  # what the estimate is based on and leaves out
    # The simulated schedule; ``None`` with one stage, or if it is too long.
    schedule: Timeline | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's FLOPs per second as a fraction of the GPUs' peak (Chowdhery et al.
        2022).
        """
        return self.flops / (self.seconds * self.ranks * self.hardware.flops)

    @property
    def fullest(self) -> StageEstimate:
        """The estimate of the pipeline rank that is likely to reserve the most memory."""
        return max(self.stages, key=lambda stage: stage.memory.likely)

    @property
    def needed(self) -> float:
        """Bytes that the pipeline rank with the most memory needs to run."""
        return self.fullest.memory.needed

    @property
    def likely(self) -> float:
        """Bytes that the pipeline rank with the most memory is likely to reserve."""
        return self.fullest.memory.likely

    @property
    def verdict(self) -> str:
        """Tell whether the fullest rank fits into the hardware's memory: ``fits``, ``tight`` (the allocator will be
        short of memory, and so slow) or ``does not fit``.
        """
        return self.hardware.verdict(self.needed, self.likely)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the estimate as JSON, in bytes and seconds."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain numbers and strings."""
        machine = self.hardware
        sizes = ("needed", "likely")
        machine_bytes = {"budget": machine.budget, "device": machine.memory}
        return {
            "hardware": machine.name,
            "layout": self.layout,
            "ranks": self.ranks,
            "tokens_per_step": self.tokens,
            "verdict": self.verdict,
            "memory": {"needed": self.needed, "likely": self.likely} | machine_bytes,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "time": self.time.terms,
            "stages": [
                {
                    **vars(stage),
                    **{name: getattr(stage.memory, name) for name in sizes},
                    "memory": stage.memory.kinds,
                }
                for stage in self.stages
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        machine = self.hardware
        kinds = list(self.stages[0].memory.kinds)
        needs = f"{human(round(self.likely))} likely, {human(round(self.needed))} needed"
        fit = f"{needs} of {human(round(machine.memory))}"
        memory = [["rank", "layers", *kinds, "needed", "likely"]]
        for stage in self.stages:
            sizes = [
                *stage.memory.kinds.values(),
                round(stage.memory.needed),
                round(stage.memory.likely),
            ]
            memory.append(
                [
                    str(stage.rank),
                    str(stage.layers),
                    *map(human, sizes),
                ]
            )
        terms = sorted(self.time.terms.items(), key=lambda item: -item[1])
        seconds = [[name, f"{s:.4f}", f"{100 * s / self.seconds:.1f}%"] for name, s in terms if s]
        seconds = [["seconds", "", "share"], *seconds, ["total", f"{self.seconds:.4f}", "100.0%"]]
        return "\n".join(
            [
                f"{self.layout} on {self.ranks} x {machine.label}: {self.verdict} ({fit})",
                f"{self.seconds:.3g} s for a step of {self.tokens:,} tokens: {self.tokens_per_second:,.0f} tokens/s, "
                f"{self.tokens_per_second / self.ranks:,.0f} per rank, MFU {100 * self.mfu:.1f}%",
                "",
                *aligned(memory),
                "",
                *aligned(seconds),
                "",
                *self.notes,
            ]
        )


def estimate(
    source: str | PathLike[str] | PreTrainedConfig | Plan,
    parallel: ParallelConfig | None = None,
    hardware: str | Machine = "h100",
    *,
    sequence_length: int = 4096,
    batch_size: int = 1,
    num_microbatches: int | None = None,
    optimizer: str = "adamw_torch_fused",
    optim_args: Mapping[str, Any] | None = None,
    mixed_precision: str = "no",
    **plan_kwargs: Any,
) -> Estimate:
    """Estimate, without running it, the seconds of one training step (matrix products, communication, pipeline bubble
    ...) and the bytes that each pipeline rank holds (weights, activations ...).
    Bytes are those of :func:`hfscale.memory_estimate`. Seconds come from constants that were fitted on runs of hfscale
    on one H100 and one H200 (for communication, on runs of other code on H100s), or from the measurements of ``hfscale
    calibrate``.

    Args:
        source: a plan, or the source of one for :func:`hfscale.plan`: a config, a path or an id.
        parallel: the layout; leave it out if ``source`` is a plan.
        hardware: a name (``h100``, ``rtx-4090``, ``mi300x``, ...: :func:`machine_names`), a JSON file of
            ``hfscale calibrate``, or a :class:`hfscale.cost.model.machines_known.Machine`.
        sequence_length: tokens of a sequence.
        batch_size: sequences per microbatch of one data-parallel rank.
        num_microbatches: microbatches of one data-parallel rank per step; by default the layout's, or one per stage.
        optimizer: a name that :func:`hfscale.create_optimizer` accepts.
        optim_args: options of the optimizer that change its state.
        mixed_precision: ``"no"``, ``"bf16"``, ``"bf16_params"`` or ``"fp8"``.
        plan_kwargs: arguments of :func:`hfscale.plan`: ``dtype``, ``memory``, ``peft_config``, ...

    Raises:
        ConfigError: the hardware or the optimizer is unknown, or a size is impossible.
        PlanError: the layout does not fit the model.
    """
    check_count("sequence_length", sequence_length)
    check_asked(batch_size, num_microbatches, str(mixed_precision), optim_args, tokens="batch_size")
    machine = find_machine(hardware)
    constants = constants_of(hardware)
    if isinstance(source, Plan):
        if parallel is not None and parallel != source.layout:
            raise ConfigError(
                "estimate got a plan and parallel= with another layout than the plan's: give the config instead of "
                "the plan, or leave parallel out"
            )
        plan = source
        spec = None
    else:
        config = (
            source
            if isinstance(source, PreTrainedConfig)
            else load_config(str(source), dict(plan_kwargs))[0]
        )
        plan = make_plan(config, parallel, mixed_precision=mixed_precision, **plan_kwargs)
        spec = run_spec(config, mixed_precision=mixed_precision, **plan_kwargs)
    sizes = sequence_length, batch_size, num_microbatches
    shape, job, held = costs(
        plan, spec, *sizes, mixed_precision, optimizer=optimizer, options=optim_args
    )
    estimated = _of_plan(plan, shape, job, machine, constants, held)
    return replace(estimated, notes=(*estimated.notes, *evidence(hardware)))


def costs(
    plan: Plan,
    spec: RunSpec | None,
    sequence: int,
    batch: int,
    microbatches: int | None,
    mixed_precision: str,
    **of_optimizer: Any,
) -> tuple[ModelShape, Job, list[MemoryEstimate]]:
    """Return what estimates and dry runs are computed from: the sizes of the plan's decoder, the description of a step,
    and the memory of each pipeline rank. With ``spec``, layers of unknown kinds are measured on the meta device.
    """
    count = microbatches or plan.layout.num_microbatches or plan.layout.pp
    shape = shape_of_plan(plan, None if spec is None else spec.config)
    job = job_of(plan, sequence=sequence, batch=batch, microbatches=count, mixed=mixed_precision)
    held = memory_of_ranks(
        plan,
        tokens=sequence * batch,
        sequence_length=sequence,
        num_microbatches=count,
        mixed_precision=mixed_precision,
        routes=shape.routed or None,
        measured=None if spec is None else measured_layers(plan, spec, sequence, batch),
        **of_optimizer,
    )
    return shape, job, held


def _of_plan(
    plan: Plan,
    shape: ModelShape,
    job: Job,
    machine: Machine,
    constants: Constants,
    held: Sequence[MemoryEstimate],
) -> Estimate:
    """Estimate the seconds of a plan's step, and return them with the memory of each pipeline rank (``held``)."""
    places = places_of(plan)
    weights = shape.layers * shape.active_weights + shape.table_weights
    attention = 12 * shape.layers * job.sequence * shape.queries / (2 if job.causal else 1)
    flops = float(job.step_tokens * ((4 + 2 * job.trained) * weights + attention))
    stages = stage_seconds(places, part_seconds(shape, job, machine, constants))
    job = with_host_of(plan, job, max(rank.offloaded for rank in held))
    hop = constants.hop if plan.layout.pp > 1 else 0.0
    taken = [stage.stage(constants) + hop for stage in stages]
    played = _played(plan, taken, job)
    bubble = None if played is None else max(0.0, played.makespan - job.microbatches * max(taken))
    of_ranks = [place.weights for place in places]
    experts = [place.expert_weights for place in places]
    time = step_time(stages, of_ranks, job, machine, constants, bubble, experts)
    return Estimate(
        hardware=machine,
        layout=plan.layout.describe(),
        stages=tuple(
            StageEstimate(n, place.layers, taken[n], held[n]) for n, place in enumerate(places)
        ),
        time=time,
        tokens=job.step_tokens,
        ranks=plan.layout.total_size,
        flops=flops,
        notes=(*held[0].notes, *_range_of_mixture(shape, job, time, held)),
        schedule=played,
    )


def _range_of_mixture(
    shape: ModelShape, job: Job, time: StepTime, held: Sequence[MemoryEstimate]
) -> list[str]:
    """Return a note for MoE models: time and memory of a step if the busiest expert-parallel rank gets 1.5 times as
    many tokens as the mean.
    """
    if not shape.experts:
        return []
    equal = "mixture: estimated with equally many tokens for every expert"
    if job.layout.ep == 1:
        return [f"{equal}; without expert ranks a rank keeps as much whatever its router does"]
    more = (
        1 - (shape.layer_weights - shape.expert_weights) / shape.active_weights
    ) / 2  # additional work of a layer
    seconds = time.total + more * (time.products + time.elementwise) + time.exchange / 2
    full = max(held, key=lambda each: each.likely)
    reserved = human(round(full.likely + more * full.activations))
    return [
        f"{equal}; up to {seconds:.3g} s and {reserved} where the busiest expert rank gets half as many again"
    ]


def _played(plan: Plan, taken: list[float], job: Job) -> Timeline | None:
    """Simulate the plan's pipeline schedule with each rank's seconds per microbatch (``taken``); ``None`` if there is
    no pipeline, or if the schedule is too long.
    """
    if plan.stages is None or plan.layout.pp * job.microbatches * job.virtual > _MOST_ACTIONS:
        return None
    again = 1 + job.recompute
    costs = Costs(
        forward=1 / (2 + again),
        backward=(1 + again) / (2 + again),
        backward_input=again / (2 + again),
        backward_weight=1 / (2 + again),
        stages=tuple(taken[rank] / job.virtual for rank in plan.stages.ranks),
    )
    actions = order(
        str(plan.layout.pipeline_schedule), plan.layout.pp, job.microbatches, job.virtual
    )
    return simulate(actions, costs, str(plan.layout.pipeline_schedule))
