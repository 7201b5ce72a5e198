"""Check a recipe: ranks and batches, whether the layout fits the model, trained parameters, memory of a rank."""

from collections.abc import Callable
from typing import Any

import torch

import hfscale

from ..._compat.torch_device import accelerators
from ...config.parallel import AXES, ParallelConfig
from ...errors import HFScaleError
from ...features.adapters import describe_coverage
from ...plan import Plan
from ...plan.table import human
from ...recipes.batch_sizes import of_one_microbatch, per_rank
from ...recipes.places import check_places
from ...recipes.run import AnyRecipe, adapter_of, config_of, options_of, quantization_of
from ...recipes.schema import FinetuneRecipe
from ...recipes.tasks import model_options
from . import Finding


def examine(recipe: AnyRecipe) -> list[Finding]:
    """Return all findings about a recipe, without reading weights or starting processes."""
    try:
        layout = ParallelConfig(**recipe.parallel)
    except HFScaleError as error:
        return [Finding("layout", "problem", str(error))]
    findings = [_ranks(layout), *_tried("batches", lambda: [_batches(recipe, layout)])]
    findings += _tried("places", lambda: [_places(recipe)])
    plans: list[Plan] = []
    findings += _tried("plan", lambda: _planned(recipe, layout, plans))
    for planned in plans:
        trained = (
            describe_coverage(planned).splitlines() if planned.adapters else ["all parameters"]
        )
        findings += [Finding("trains", "ok", line) for line in trained]
        findings += _tried("memory", lambda plan=planned: [_memory(recipe, layout, plan)])  # type: ignore[misc]
    return findings


def _tried(about: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return look()
    except (HFScaleError, OSError) as error:  # transformers' own, for a missing base
        return [Finding(about, "problem", str(error))]


def _ranks(layout: ParallelConfig) -> Finding:
    axes = (
        ", ".join(f"{axis} {layout.asked(axis)}" for axis in AXES if layout.asked(axis) > 1)
        or "one on every axis"
    )
    processes = layout.total_size
    gpus = accelerators().device_count()
    text = f"{processes} process(es): {axes}"
    if 0 < gpus < processes:
        text += f"; this machine has {gpus} GPU(s): several machines, or a smaller layout"
        return Finding("ranks", "problem", text)
    return Finding("ranks", "ok", text)


def _batches(recipe: AnyRecipe, layout: ParallelConfig) -> Finding:
    training = recipe.training
    count, size = per_rank(training.batch_size, layout.batch_world, training.microbatch_size)
    tokens = training.batch_size * recipe.data.sequence_length
    return Finding(
        "batches",
        "ok",
        f"{layout.batch_world} distinct in a step, each of {count} microbatch(es) of {size} sequence(s): effective "
        f"batch {training.batch_size} sequences, {tokens:,} tokens; {training.steps * tokens:,} tokens in "
        f"{training.steps} steps",
    )


def _places(recipe: AnyRecipe) -> Finding:
    check_places(recipe)
    return Finding("places", "ok", f"results go to {recipe.directory}")


def _planned(recipe: AnyRecipe, layout: ParallelConfig, plans: list[Plan]) -> list[Finding]:
    options: dict[str, Any] = {"dtype": recipe.training.dtype, **options_of(recipe)}
    for name in ("routing", "use_liger_kernel"):  # options on which no plan depends
        options.pop(name, None)
    source: Any
    if isinstance(recipe, FinetuneRecipe):
        source = recipe.base
        options |= {
            "quantization_config": quantization_of(recipe),
            "peft_config": adapter_of(recipe),
        }
        options |= model_options(recipe.data, None)
    else:
        source = config_of(recipe)
    planned = hfscale.plan(
        source, layout, **{name: value for name, value in options.items() if value is not None}
    )
    plans.append(planned)
    if planned.no_step:
        return [Finding("plan", "problem", f"train_step cannot run it: {planned.no_step}")]
    count = sum(torch.Size(parameter.shape).numel() for parameter in planned.owned())
    return [
        Finding("plan", "ok", f"{planned.family}, {count:,} parameters, fits {layout.describe()}")
    ]


def _memory(recipe: AnyRecipe, layout: ParallelConfig, plan: Plan) -> Finding:
    training = recipe.training
    expected = hfscale.memory_estimate(
        plan,
        training.optimizer,
        mixed_precision=training.mixed_precision,
        **of_one_microbatch(recipe, layout),
    )
    kinds = ", ".join(f"{name} {human(size)}" for name, size in expected.kinds.items() if size)
    text = f"predicted peak of the rank with most: {human(expected.total)} ({kinds})"
    gpu = (
        accelerators().get_device_properties(0).total_memory if accelerators().is_available() else 0
    )
    if 0 < gpu < expected.total:
        text += f"; a GPU has {human(gpu)}: more ranks, smaller microbatches, recomputation"
        return Finding("memory", "problem", text)
    return Finding("memory", "ok", text)
