"""Seconds and bytes of a layout of a model: :func:`estimate`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ...api.arguments import load_config
from ...api.build import plan as make_plan
from ...config.parallel import ParallelConfig
from ...errors import ConfigError, check_count
from ...parallel.pipeline import Costs, Timeline, order, simulate
from ...plan import Plan
from ..model.constants import Constants, fitted, read_constants
from ..model.job import Job
from ..model.jobs import job_of, with_host
from ..model.layer_time import Seconds, edge_seconds, head_seconds, layer_seconds
from ..model.machine import Machine, find_machine
from ..model.memory import MemoryEstimate
from ..model.model_shape import ModelShape
from ..model.places import layers_of, places_of
from ..model.shapes import shape_of_plan
from ..model.step_time import step_time
from .measure_layers import measured_layers
from .memory_report import check_asked, memory_of_ranks
from .meta_model import run_spec
from .report import Estimate, StageEstimate

_MOST_ACTIONS = 100_000  # that are played through; a formula says the rest


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
    """Seconds and bytes of one training step: for every pipeline rank, by kind and by term. Nothing is run.

    Bytes are those of :func:`hfscale.memory_estimate`. Seconds come from constants that were fitted on public runs of
    other code on H100s, or from what ``hfscale calibrate`` measured; hfscale itself was not run on GPUs yet.

    Args:
        source: a plan, or what :func:`hfscale.plan` takes: a config, a path or an id.
        parallel: the layout; with a plan, the plan's.
        hardware: a name (``h100``, ``h200``, ``b200``, ``a100-80``, ``a100-40``), a JSON file of ``hfscale calibrate``,
            or a :class:`hfscale.cost.model.machine.Machine`.
        sequence_length: tokens of a sequence.
        batch_size: sequences of one microbatch of one batch rank.
        num_microbatches: of one batch rank in a step; by default the layout's, or as many as there are stages.
        optimizer: a name that :func:`hfscale.create_optimizer` knows.
        optim_args: its options, where they change its state.
        mixed_precision: ``"no"`` or ``"bf16"``.
        plan_kwargs: of :func:`hfscale.plan`: ``dtype``, ``memory``, ``peft_config``, ``quantization_config``, ...

    Raises:
        ConfigError: the hardware or the optimizer is unknown, or a size is impossible.
        PlanError: the layout does not fit the model.
    """
    check_count("sequence_length", sequence_length)
    check_asked(batch_size, num_microbatches, str(mixed_precision), optim_args, tokens="batch_size")
    machine, constants = find_machine(hardware), constants_of(hardware)
    plan, config = _planned(source, parallel, plan_kwargs)
    count = num_microbatches or plan.layout.num_microbatches or plan.layout.pp
    shape = shape_of_plan(plan, config)
    mixed = mixed_precision != "no"
    job = job_of(plan, machine, sequence=sequence_length, batch=batch_size, microbatches=count, mixed=mixed)
    asked = None if config is None else run_spec(config, mixed_precision=mixed_precision, **plan_kwargs)
    seen = None if asked is None else measured_layers(plan, asked, sequence_length, batch_size)
    held = memory_of_ranks(
        plan,
        optimizer,
        tokens=sequence_length * batch_size,
        sequence_length=sequence_length,
        num_microbatches=count,
        optim_args=optim_args,
        mixed_precision=mixed_precision,
        routes=shape.routed or None,
        measured=seen,
    )
    return _of_plan(plan, shape, job, machine, constants, held)


def _of_plan(
    plan: Plan, shape: ModelShape, job: Job, machine: Machine, constants: Constants, held: Sequence[MemoryEstimate]
) -> Estimate:
    """Of a plan whose memory is known."""
    stages, weights, experts = _stages(plan, shape, job, machine, constants)
    job = with_host(plan, job)
    hop = constants.hop if job.pp > 1 else 0.0
    taken = [stage.stage(constants) + hop for stage in stages]
    layers, played = layers_of(plan), _played(plan, taken, job)
    bubble = None if played is None else max(0.0, played.makespan - job.microbatches * max(taken))
    return Estimate(
        hardware=machine,
        layout=plan.layout.describe(),
        stages=tuple(StageEstimate(rank, layers[rank], taken[rank], held[rank]) for rank in range(job.pp)),
        time=step_time(stages, weights, job, machine, constants, bubble, experts),
        tokens=job.step_tokens,
        ranks=job.ranks,
        flops=step_flops(shape, job),
        notes=(*held[0].notes, _NOTE),
        schedule=played,
    )


_NOTE = "seconds: estimated with constants of other code on GPUs; hfscale was not measured on them yet"


def step_flops(shape: ModelShape, job: Job) -> float:
    """Operations of a step as they are usually counted: 6 for every weight that trains and token, 4 for others, 12 s q
    for attention, half of it where it is causal; nothing twice.
    """
    weights = shape.layers * shape.active_weights + shape.table_weights
    attention = 12 * shape.layers * job.sequence * shape.queries / (2 if job.causal else 1)
    return float(job.step_tokens * ((4 + 2 * job.trained) * weights + attention))


def constants_of(hardware: str | Machine) -> Constants:
    """What a calibration measured, or what was fitted on public runs."""
    path = Path(hardware) if isinstance(hardware, str) else None
    if path is not None and path.is_file() and '"time"' in path.read_text():
        return read_constants(path)
    return fitted()


def _planned(source: Any, parallel: ParallelConfig | None, kwargs: dict[str, Any]) -> tuple[Plan, Any]:
    if isinstance(source, Plan):
        if parallel is not None and parallel != source.layout:
            raise ConfigError("estimate got a plan and another layout: give the config instead of the plan")
        return source, None
    config = source if isinstance(source, PreTrainedConfig) else load_config(str(source), dict(kwargs))[0]
    return make_plan(config, parallel, **kwargs), config


def _stages(
    plan: Plan, shape: ModelShape, job: Job, machine: Machine, constants: Constants
) -> tuple[list[Seconds], list[float], list[float]]:
    """For each pipeline rank the seconds of a microbatch, its entries of matrices, and those of experts besides."""
    layer, head, edge = (part(shape, job, machine, constants) for part in (layer_seconds, head_seconds, edge_seconds))
    seconds, places = [], places_of(plan, job)
    for place in places:
        seconds.append(layer * place.layers + (head if place.head else Seconds()) + edge * place.ends)
    weights = [place.layer_weights + place.table_weights for place in places]
    return seconds, weights, [place.expert_weights for place in places]


def _played(plan: Plan, taken: list[float], job: Job) -> Timeline | None:
    """The plan's schedule, with each rank's own seconds, where there is one that can be played through."""
    if plan.stages is None or job.pp * job.microbatches * job.virtual > _MOST_ACTIONS:
        return None
    again = 1 + job.recompute
    costs = Costs(
        forward=1 / (2 + again),
        backward=(1 + again) / (2 + again),
        backward_input=again / (2 + again),
        backward_weight=1 / (2 + again),
        stages=tuple(taken[rank] / job.virtual for rank in plan.stages.ranks),
    )
    actions = order(str(plan.layout.pipeline_schedule), job.pp, job.microbatches, job.virtual)
    return simulate(actions, costs, str(plan.layout.pipeline_schedule))
