"""Write a run's model card: layout, data, hyperparameters, measurements, versions, how to load it."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData

import hfscale

from .._compat.torch_device import accelerators
from .memory_limit import GIB
from .run_log import read_metrics
from .samples import Sample
from .schema import DataRecipe, FinetuneRecipe, Recipe
from .tasks import task_of
from .templates import environment
from .trainer import Outcome


@dataclass(frozen=True)
class Made:
    """Describe a directory of weights that a run has written."""

    kind: str  # ``full`` (all parameters were trained), ``adapter``, or ``merged``: base and adapter in one
    validation_loss: float  # of these weights
    accuracy: float | None = None  # likewise, where it is counted
    coverage: str = ""  # what the adapter covers, in lines

    @property
    def directory(self) -> str:
        """The directory's name inside that of the run."""
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
    task, base = task_of(recipe.data), Path(recipe.base) if isinstance(recipe, FinetuneRecipe) else None
    if base is not None and base.is_absolute():  # without this machine's directories
        base = Path(*base.parts[-2:])
    with torch.device("meta"):
        parameters = int(task.auto_class.from_config(config).num_parameters())
    trained, evaluated = read_metrics(recipe.metrics)
    packages = {each.__name__: each.__version__ for each in (torch, transformers, accelerate, hfscale)}
    text = _ENVIRONMENT.get_template("card.md").render(
        metadata=_metadata(config, recipe, made).to_yaml(),
        config=config, recipe=recipe, data=recipe.data, training=recipe.training, task=task,
        layout=layout, outcome=outcome, made=made, expected=expected, shown=shown,
        base=base.as_posix() if base else "",
        source=describe_source(recipe.data),
        parameters=parameters,
        device=accelerators().get_device_name() if accelerators().is_available() else "CPU, gloo",
        train_sequences=train_sequences,
        trained=trained,
        evaluated=evaluated,
        versions={"python": platform.python_version(), **packages},
    )  # fmt: skip
    return ModelCard(text)


def describe_samples(shown: Sequence[Sample]) -> str:
    """Return the card's section of samples; empty without samples."""
    return _ENVIRONMENT.get_template("samples.md").render(shown=shown)


def describe_source(data: DataRecipe) -> str:
    """Return the source of the text, without its directory on this machine."""
    library = f"Python {platform.python_version()}'s standard library"
    if data.source == "stdlib-docs":
        return f"questions about functions of {library} with their docstrings"
    if data.source == "stdlib":
        return f"the source of {library}"
    path = Path(data.source)
    return f"`{path.name}`" if path.exists() else f"`{data.source}` ({data.split})"


def _metadata(config: Any, recipe: Recipe, made: Made) -> ModelCardData:
    """Return the metadata that the Hub reads from a card."""
    tuned = recipe if isinstance(recipe, FinetuneRecipe) else None
    tags = ["hfscale", config.model_type, "fine-tuned" if tuned else "pretrained"]
    if tuned and made.coverage:
        tags += sorted({"adapter", tuned.adapter.get("method", "adapter")})
    data, task = recipe.data, task_of(recipe.data)
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
    """Return a text as a cell of a table, line by line."""
    lines = (line.replace("|", "&#124;").replace("<", "&lt;") for line in text.splitlines())
    return "<br>".join(f"<code>{line}</code>" for line in lines if line.strip())


_ENVIRONMENT = environment()
_ENVIRONMENT.globals |= {"listed": _listed, "vars": vars, "gib": lambda size: size / GIB}
_ENVIRONMENT.filters |= {"code": _code, "plain": lambda text: text.replace("|", "/").replace("\n", " ")}
