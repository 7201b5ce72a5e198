"""The model card of a run: layout, data, hyperparameters, what was measured, versions, how to load it."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData

import hfscale

from .._compat.torch_device import accelerators
from .adapting import describe_adapter, describe_loading
from .run_log import metrics_of, read_metrics
from .samples import Sample, describe_samples
from .schema import DataRecipe, FinetuneRecipe, Recipe
from .tasks import Task, task_of
from .trainer import Outcome


@dataclass(frozen=True)
class Made:
    """A directory of weights that a run has written.

    Attributes:
        kind: ``full`` (all parameters were trained), ``adapter``, or ``merged``: base and adapter in one.
        validation_loss: of these weights.
        accuracy: likewise, where it is counted.
        coverage: what the adapter covers, in lines.
    """

    kind: str
    validation_loss: float
    accuracy: float | None = None
    coverage: str = ""

    @property
    def directory(self) -> str:
        """Its name in the run's."""
        return "adapter" if self.kind == "adapter" else "checkpoint"


def make_card(
    config: Any,
    recipe: Recipe,
    layout: hfscale.ParallelConfig,
    outcome: Outcome,
    train_sequences: int,
    made: Made,
    expected: Any = None,
    shown: Sequence[Sample] = (),
) -> ModelCard:
    """Return the card: the model, its data, how it was trained, and the measurements."""
    tuned = recipe if isinstance(recipe, FinetuneRecipe) else None
    base = _without_machine(tuned.base) if tuned else ""
    source, task = describe_source(recipe.data), task_of(recipe.data)
    text = _TEMPLATE.format(
        yaml=_metadata(config, recipe, source, made).to_yaml(),
        name=recipe.name,
        architecture=(config.architectures or [config.model_type])[0],
        parameters=_parameters(config, task),
        origin=_origin(made.kind, base),
        source=source,
        loading=describe_loading(tuned, base) if tuned and made.kind == "adapter" else _plain(task),
        adapting="".join(f"{line}\n" for line in describe_adapter(tuned, made.coverage))
        if tuned and made.coverage
        else "",
        layout=describe_layout(layout),
        processes=layout.total_size,
        device=accelerators().get_device_name() if accelerators().is_available() else "CPU, gloo",
        train_sequences=train_sequences,
        length=recipe.data.sequence_length,
        selection=_selection(recipe.data),
        rows=_rows(recipe.data),
        optimizer=_optimizer(recipe.training.optimizer),
        training=_table(vars(recipe.training)),
        seed=recipe.seed,
        train_loss=outcome.train_loss,
        first=outcome.first_validation_loss,
        last=outcome.validation_loss,
        found=made.validation_loss,
        merged=f"| validation loss once merged | {made.validation_loss:.4f} |\n" if made.kind == "merged" else "",
        each=task.each,
        baseline=task.baseline,
        knows=task.knows,
        entropy=outcome.baseline,
        right="" if made.accuracy is None else f" **Accuracy {made.accuracy:.1%}** of the {task.each}s.",
        losses=_loss_table(metrics_of(recipe)),
        samples=describe_samples(shown),
        tokens=outcome.tokens,
        speed=outcome.tokens_per_second,
        memory=outcome.memory / 2**30,
        before=outcome.memory_before / 2**30,
        expected=f"; predicted {expected.total / 2**30:.2f} GiB" if expected is not None else "",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        accelerate=accelerate.__version__,
        hfscale=hfscale.__version__,
    )
    return ModelCard(text)


def _metadata(config: Any, recipe: Recipe, source: str, made: Made) -> ModelCardData:
    """Return the metadata that the Hub reads from a card."""
    tuned = recipe if isinstance(recipe, FinetuneRecipe) else None
    tags = ["hfscale", config.model_type, "fine-tuned" if tuned else "pretrained"]
    if tuned and made.coverage:
        tags += sorted({"adapter", tuned.adapter.get("method", "adapter")})
    return ModelCardData(
        model_name=recipe.name,
        library_name="peft" if made.kind == "adapter" else "transformers",
        pipeline_tag=task_of(recipe.data).tag,
        tags=tags,
        base_model=tuned.base if tuned and not _is_local(tuned.base) else None,
        datasets=[recipe.data.source] if _is_hub_data(recipe.data) else None,
        eval_results=[
            EvalResult(
                task_type=task_of(recipe.data).tag,
                dataset_type="text",
                dataset_name=f"{source} (validation)",
                metric_type="loss",
                metric_name=f"validation loss (nats per {task_of(recipe.data).each})",
                metric_value=round(made.validation_loss, 4),
            )
        ],
    )


def _origin(kind: str, base: str) -> str:
    """Return a line about the base model, or about training from random weights."""
    return {
        "full": f"all of them fine-tuned from `{base}`" if base else "from random weights",
        "adapter": f"an adapter over `{base}`, which stays as it is",
        "merged": f"an adapter over `{base}`, merged into it",
    }[kind]


def describe_layout(layout: hfscale.ParallelConfig) -> str:
    """Return the axes of the layout, and the schedule of a pipeline."""
    if layout.pp == 1:
        return layout.describe()
    stages = layout.pp * int(layout.virtual_stages or 1)
    schedule = Path(str(layout.pipeline_schedule)).name  # a file's, without saying where it lies
    microbatches = f", {layout.num_microbatches} microbatches" if layout.num_microbatches else ""
    return f"{layout.describe()}, {schedule} over {stages} stages{microbatches}"


def describe_source(data: DataRecipe) -> str:
    """Return the source of the text, without its directory on this machine."""
    if data.source == "stdlib-docs":
        return (
            f"questions about functions of Python {platform.python_version()}'s standard library with their docstrings"
        )
    if data.source == "stdlib":
        return f"the source of Python {platform.python_version()}'s standard library"
    path = Path(data.source)
    return f"`{path.name}`" if path.exists() else f"`{data.source}` ({data.split})"


def _selection(data: DataRecipe) -> str:
    parts = [f"all but `{'`, `'.join(data.exclude)}`"] if data.exclude else []
    parts += [f"only `{'`, `'.join(data.include)}`"] if data.include else []
    return f"Of its documents, {', '.join(parts)}" if parts else "All its documents"


def _rows(data: DataRecipe) -> str:
    """Return how sequences are made, and their length."""
    if data.is_stream:
        return "Documents are put one after the other, with an end-of-text token after each, and cut into sequences of"
    if data.images_column is not None:
        return (
            "Conversations with pictures have sequences, of which only what the assistant says has labels, of at most"
        )
    what = {"text": "Documents", "chat": "Conversations", "completion": "Prompts with completions"}.get(data.format)
    if what is None:
        what = "Two texts each, of which one is preferred," if data.format == "pairs" else "Texts with a class each"
        return f"{what} have sequences of at most"
    labels = "" if data.format == "text" or data.train_on == "all" else ", of which only completions have labels,"
    if data.is_packed:
        return f"{what}{labels} are packed, none of them seeing another, into sequences of at most"
    return f"{what}{labels} have a sequence each, of at most"


def _is_hub_data(data: DataRecipe) -> bool:
    return data.source not in ("stdlib", "stdlib-docs") and not Path(data.source).exists()


def _without_machine(base: str) -> str:
    """Return a path as the recipe gives it, or its last parts if it is absolute."""
    path = Path(base)
    return Path(*path.parts[-2:]).as_posix() if path.is_absolute() else path.as_posix()


def _is_local(base: str) -> bool:
    return Path(base).is_dir()


def _parameters(config: Any, task: Task) -> int:
    with torch.device("meta"):
        return int(task.auto_class.from_config(config).num_parameters())


def _optimizer(name: str) -> str:
    return "AdamW" if name.startswith("adamw_torch") else f"`{name}`, a name of HF Trainer's,"


def _table(values: dict[str, Any]) -> str:
    rows = [f"| {name} | {'-' if value is None else value} |" for name, value in values.items()]
    return "\n".join(["| key | value |", "|---|---|", *rows])


def _loss_table(metrics: Path) -> str:
    """Return one table row per evaluation, with the training loss logged last before it."""
    training, evaluation = read_metrics(metrics)
    rows = []
    for record in evaluation:
        before = [r["loss"] for r in training if r["step"] <= record["step"]]
        shown = f"{before[-1]:.4f}" if before else ""
        rows.append(f"| {record['step']} | {shown} | {record['validation_loss']:.4f} |")
    return "\n".join(["| step | train loss | validation loss |", "|---|---|---|", *rows])


def _plain(task: Task) -> str:
    """Return the code that loads the checkpoint."""
    reader = task.reader.__name__
    return f"""```python
from transformers import {task.class_name}, {reader}

model = {task.class_name}.from_pretrained("path/of/this/directory")
{reader.removeprefix("Auto").lower()} = {reader}.from_pretrained("path/of/this/directory")
```

It is an ordinary Hugging Face checkpoint; hfscale need not be installed."""


_TEMPLATE = """---
{yaml}
---

# {name}

`{architecture}` with {parameters:,} parameters, trained with hfscale: {origin}, on
{source}.
{adapting}
**Validation loss {found:.4f} nats per {each}.**{right} The {baseline} of the same data is {entropy:.4f}:
{knows}.

## Load it

{loading}

## Measured

| | |
|---|---|
| layout | {layout} ({processes} process(es), {device}) |
| train loss (mean since the previous log line) | {train_loss:.4f} |
| validation loss before training | {first:.4f} |
| validation loss after training | {last:.4f} |
{merged}| {baseline} of the validation data | {entropy:.4f} |
| tokens trained on | {tokens:,} |
| tokens per second, all processes | {speed:,.0f} |
| peak memory of the largest process | {memory:.2f} GiB ({before:.2f} GiB before the first step{expected}) |

{losses}

![losses](loss.png)
{samples}
## Data

From: {source}.
{selection}. {rows}
{length} tokens: {train_sequences:,} to train on. Those to validate on are from other documents, chosen by name.

## Hyperparameters

{optimizer} (betas 0.9, 0.95), cosine schedule after a linear warm-up, seed {seed}.

{training}

## Versions

Python {python}, torch {torch}, transformers {transformers}, accelerate {accelerate}, hfscale {hfscale}
"""
