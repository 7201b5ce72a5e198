"""Write the results of a run after training: weights, plots, and a model card."""

import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from omegaconf import OmegaConf

import hfscale

from .._compat.torch_device import accelerators
from .batch_sizes import GIB, beside
from .main_process import on_main
from .pictures import Sample, opened
from .run_log import plot_losses, read_metrics
from .schema import DataRecipe, FinetuneRecipe, Recipe
from .tasks import task_of
from .templates import environment
from .trainer import Outcome, RecipeTrainer


@dataclass(frozen=True)
class Made:
    """Describe one directory of weights that a run has written, for its model card."""

    kind: str  # ``full`` (all parameters were trained), ``adapter``, or ``merged``: base and adapter in one
    validation_loss: float  # validation loss of these weights
    accuracy: float | None = None  # accuracy of these weights, if the task counts it
    coverage: str = ""  # report of the modules that the adapter covers

    @property
    def directory(self) -> str:
        """The name of the directory inside the run's directory: ``adapter`` or ``checkpoint``."""
        return "adapter" if self.kind == "adapter" else "checkpoint"


def make_card(config: Any, recipe: Recipe, made: Made, **told: Any) -> ModelCard:
    """Return the model card, which describes the model, its data, its training and the measurements. ``told`` holds
    further variables that the card's template reads.
    """
    task = task_of(recipe.data)
    base = Path(recipe.base) if isinstance(recipe, FinetuneRecipe) else None
    if base is not None and base.is_absolute():  # do not publish directories of this machine
        base = Path(*base.parts[-2:])
    with torch.device("meta"):
        parameters = int(task.auto_class.from_config(config).num_parameters())
    trained, evaluated = read_metrics(recipe.metrics)
    packages = {
        library.__name__: library.__version__
        for library in (torch, transformers, accelerate, hfscale)
    }
    text = _ENVIRONMENT.get_template("card.md").render(
        metadata=_metadata(config, recipe, made).to_yaml(),
        config=config, recipe=recipe, data=recipe.data, training=recipe.training, task=task,
        made=made, base=base.as_posix() if base else "",
        source=describe_source(recipe.data),
        parameters=parameters,
        device=accelerators().get_device_name() if accelerators().is_available() else "CPU, gloo",
        trained=trained, evaluated=evaluated,
        versions={"python": platform.python_version(), **packages}, **told,
    )  # fmt: skip
    return ModelCard(text)


def describe_source(data: DataRecipe) -> str:
    """Return a description of the data source for the model card, without paths of this machine."""
    library = f"Python {platform.python_version()}'s standard library"
    if data.source == "stdlib-docs":
        return f"questions about functions of {library} with their docstrings"
    if data.source == "stdlib":
        return f"the source of {library}"
    path = Path(data.source)
    return f"`{path.name}`" if path.exists() else f"`{data.source}` ({data.split})"


def _metadata(config: Any, recipe: Recipe, made: Made) -> ModelCardData:
    tuned = recipe if isinstance(recipe, FinetuneRecipe) else None
    tags = ["hfscale", config.model_type, "fine-tuned" if tuned else "pretrained"]
    if tuned and made.coverage:
        tags += sorted({"adapter", tuned.adapter.get("method", "adapter")})
    data = recipe.data
    task = task_of(recipe.data)
    result = EvalResult(
        task_type=task.tag,
        dataset_type="text",
        dataset_name=f"{describe_source(data)} (validation)",
        metric_type="loss",
        metric_name=f"validation loss (nats per {task.each})",
        metric_value=round(made.validation_loss, 4),
    )
    is_here = data.source in ("stdlib", "stdlib-docs") or Path(data.source).exists()
    return ModelCardData(
        model_name=recipe.name,
        library_name="peft" if made.kind == "adapter" else "transformers",
        pipeline_tag=task.tag,
        tags=tags,
        base_model=tuned.base if tuned and not Path(tuned.base).is_dir() else None,
        datasets=None if is_here else [data.source],
        eval_results=[result],
    )


def _listed(values: Mapping[str, Any], *without: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if name not in without)


def _code(text: str) -> str:
    """Format a text of several lines as one cell of a Markdown table, each line as code."""
    lines = (line.replace("|", "&#124;").replace("<", "&lt;") for line in text.splitlines())
    return "<br>".join(f"<code>{line}</code>" for line in lines if line.strip())


_ENVIRONMENT = environment()
_ENVIRONMENT.globals |= {"listed": _listed, "vars": vars, "gib": lambda size: size / GIB}
_ENVIRONMENT.filters["right"] = lambda shown, when: sum(
    getattr(each, when) == each.wanted for each in shown
)
_ENVIRONMENT.filters |= {
    "code": _code,
    "plain": lambda text: text.replace("|", "/").replace("\n", " "),
}


def finish(
    trainer: RecipeTrainer,
    tokenizer: Any,
    recipe: Recipe,
    layout: hfscale.ParallelConfig,
    outcome: Outcome,
    train_sequences: int,
    expected: Any,
    shown: Sequence[Sample],
) -> None:
    """Write the weights, the tokenizer, the model card, ``loss.png`` and ``recipe.yaml`` of a finished run, and
    ``experts.png`` for a mixture-of-experts model; call it on every rank.

    The model card compares the ``expected`` memory with the measured memory, and lists the samples in ``shown``:
    prompts with the model's answers before and after training.
    """
    directory, adapted = (
        recipe.directory,
        recipe if isinstance(recipe, FinetuneRecipe) and recipe.adapter else None,
    )
    coverage = hfscale.coverage_report(trainer.trained) if adapted else ""
    made = [
        Made("adapter" if adapted else "full", outcome.validation_loss, outcome.accuracy, coverage)
    ]
    model = write_weights(trainer.trained, recipe)
    if adapted and adapted.merge:
        loss, accuracy = trainer.measured(model)
        trainer.log({"merged_validation_loss": loss})
        made.append(replace(made[0], kind="merged", validation_loss=loss, accuracy=accuracy))

    told = {
        "layout": layout,
        "outcome": outcome,
        "train_sequences": train_sequences,
        "expected": expected,
    }

    def describe() -> None:
        OmegaConf.save(OmegaConf.structured(recipe), directory / "recipe.yaml")
        title = f"{recipe.name} ({layout.describe_schedule()})"
        plot_losses(recipe.metrics, directory / "loss.png", title, task=task_of(recipe.data))
        if recipe.expert_loads.is_file():
            hfscale.ExpertLoadHistory.read(recipe.expert_loads).plot(directory / "experts.png")
        for part in made:
            target = directory / part.directory
            tokenizer.save_pretrained(target)
            shutil.copyfile(directory / "loss.png", target / "loss.png")
            for index, sample in enumerate(shown):
                if sample.picture:
                    opened(sample.picture).save(target / f"sample-{index}.png")
            make_card(model.config, recipe, part, shown=shown, **told).save(target / "README.md")
        print(_summary(recipe, layout, outcome, made, expected), flush=True)

    on_main(describe)
    if trainer.states_aside is not None:
        trainer.states_aside.free()


def write_weights(model: Any, recipe: Recipe) -> Any:
    """Write the trained adapter to ``adapter/``, or all weights to ``checkpoint/``; if the recipe sets ``merge``, write
    the base merged with the adapter to ``checkpoint/``, too. Return the model that was written last.
    """
    adapted = recipe if isinstance(recipe, FinetuneRecipe) and recipe.adapter else None

    def clear() -> None:  # otherwise weights of an earlier run could be taken for those of this run
        for name in ("adapter", "checkpoint"):
            shutil.rmtree(recipe.directory / name, ignore_errors=True)

    on_main(clear)
    hfscale.save_pretrained(model, recipe.directory / ("adapter" if adapted else "checkpoint"))
    if adapted is None or not adapted.merge:
        return model
    dtype = getattr(torch, adapted.merge) if isinstance(adapted.merge, str) else None
    model = hfscale.merge_and_unload(model, dtype=dtype)  # dequantizes a quantized base
    hfscale.save_pretrained(model, recipe.directory / "checkpoint")
    return model


def _summary(
    recipe: Recipe,
    layout: hfscale.ParallelConfig,
    outcome: Outcome,
    made: list[Made],
    expected: Any,
) -> str:
    task = task_of(recipe.data)
    lines = [
        f"\n{recipe.name}: {layout.describe_schedule()}, {outcome.tokens_per_second:,.0f} tokens/s, peak memory "
        f"{outcome.memory / GIB:.2f} GiB",
        f"  validation loss {outcome.first_validation_loss:.4f} -> {outcome.validation_loss:.4f}, {task.baseline} "
        f"{outcome.baseline:.4f} (nats per {task.each})",
    ]
    lines += [f"  accuracy {outcome.accuracy:.1%}"] if outcome.accuracy is not None else []
    lines += [
        f"  merged: validation loss {part.validation_loss:.4f}"
        for part in made
        if part.kind == "merged"
    ]
    lines += [f"  {beside(expected, outcome)}"] if expected is not None else []
    written: list[Path] = [
        *(recipe.directory / part.directory for part in made),
        recipe.metrics,
    ]
    return "\n".join([*lines, f"  {', '.join(map(str, written))}, {recipe.directory / 'loss.png'}"])
