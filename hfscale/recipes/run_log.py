"""Write a run's metrics during training, and plot its losses."""

import csv
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from torch.profiler import ProfilerActivity
from transformers import TrainerCallback
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

import hfscale

from .._compat.torch_device import accelerators
from .checks import STEPS_BEFORE_PROFILE, steps_to_profile
from .main_process import gathered, is_main, rank
from .schema import Recipe, RecipeError
from .tasks import Task

_KINDS = ("loss", "validation_loss", "merged_validation_loss")


def resumes_of(recipe: Recipe) -> bool:
    """Return whether the run resumes: whether any machine has a saved state to resume from, and the recipe asks to
    resume. Call it on every rank, before :class:`RunLog`, which deletes earlier files of a run that does not resume.
    """
    return any(gathered(recipe.saved_state is not None))


class MemoryUntilWritten(hfscale.StatesInMemoryCallback):
    """Keep the states that were saved in memory until the run's results are written; the parent class frees them as
    soon as training ends.
    """

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Do nothing; the parent class would free the states in memory at the end of training."""


class RunLog(TrainerCallback):
    """Write the run's metrics to ``metrics.jsonl`` (and ``metrics.csv``, if asked) on the main process. A run that does
    not resume first deletes the metrics and states of an earlier run of the same name.
    """

    def __init__(self, recipe: Recipe, resumes: bool) -> None:
        self.path = recipe.metrics
        self.experts = recipe.expert_loads
        self._csv = "csv" in recipe.tracking
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(recipe.directory / "tracking"))
        if is_main() and not resumes:
            recipe.directory.mkdir(parents=True, exist_ok=True)
            self.path.write_text("")
            # States in memory belong to an earlier run, and this directory names that run.
            shutil.rmtree(recipe.directory / "state", ignore_errors=True)
            self.experts.unlink(missing_ok=True)
            OmegaConf.save(OmegaConf.structured(recipe), recipe.directory / "recipe.yaml")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Delete metrics of steps after the saved state from which a run resumes, because it repeats these steps."""
        if not is_main():
            return
        for path in filter(Path.is_file, (self.path, self.experts)):
            lines = path.read_text().splitlines(keepends=True)
            path.write_text(
                "".join(line for line in lines if json.loads(line)["step"] <= state.global_step)
            )

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Append the newest metrics as a line to ``metrics.jsonl``."""
        record = {"step": state.global_step, **state.log_history[-1]}
        if is_main() and any(kind in record for kind in _KINDS):
            record.pop("epoch", None)
            with self.path.open("a") as stream:
                stream.write(json.dumps(record) + "\n")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write all metrics so far to ``metrics.csv``, if the recipe asks for it: one row per step, one column per
        metric.
        """
        if not is_main() or not self._csv:
            return
        rows: dict[int, dict[str, Any]] = {}
        for record in map(json.loads, self.path.read_text().splitlines()):
            rows.setdefault(record["step"], {}).update(record)
        with self.path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as stream:
            columns = list(dict.fromkeys(name for row in rows.values() for name in row))
            writer = csv.DictWriter(stream, columns, restval="")
            writer.writeheader()
            writer.writerows(rows.values())


class Profile(TrainerCallback):
    """Profile the steps that the recipe asks for, after the run's first two steps; write ``profile/rank-N.json`` for
    Perfetto or TensorBoard.
    """

    def __init__(self, recipe: Recipe) -> None:
        steps = steps_to_profile(recipe.profile, recipe.training.steps)
        kinds = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if accelerators().is_available() else []),
        ]
        plan = torch.profiler.schedule(
            wait=STEPS_BEFORE_PROFILE - 1, warmup=1, active=steps, repeat=1
        )
        self._target = recipe.directory / "profile" / f"rank-{rank()}.json"
        self._profiler: Any = torch.profiler.profile(
            activities=kinds, schedule=plan, on_trace_ready=self._write
        )

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the profiler at the beginning of training."""
        self._profiler.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Tell the profiler that a step has ended."""
        self._profiler.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop the profiler, which writes what it has recorded."""
        self._profiler.stop()

    def _write(self, profiler: Any) -> None:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._target))


def check_trackers(names: Sequence[str]) -> None:
    """Raise :class:`RecipeError` if an experiment tracker (``tensorboard``, ...) is unknown or not installed."""
    known = sorted([*INTEGRATION_TO_CALLBACK, "csv"])
    there = [*get_available_reporting_integrations(), "csv"]
    for name in names:
        if name not in known:
            raise RecipeError(
                f"tracking names {name!r}, which transformers does not report to: use {', '.join(known)}"
            )
        if name not in there:
            raise RecipeError(
                f"tracking={name} needs a package that is not installed: pip install {name}"
            )


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lines of ``metrics.jsonl`` as two lists: lines of training, and lines of evaluation."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [r for r in records if "loss" in r], [r for r in records if "validation_loss" in r]


def plot_losses(
    metrics: Path, target: Path, title: str, name: str = "loss", task: Task | None = None
) -> None:
    """Plot the metric ``name`` of the training log over steps. With a ``task``, also plot the validation loss and the
    baseline that the task compares it with.
    """
    training, evaluation = read_metrics(metrics)
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [r["step"] for r in training],
        [r[name] for r in training],
        color="#9ab8dc",
        lw=1.8,
        label="train",
    )
    axes.set(title=title, xlabel="optimizer step", ylabel=name)
    if task is not None:
        steps = [r["step"] for r in evaluation]
        losses = [r["validation_loss"] for r in evaluation]
        baseline = evaluation[-1][task.baseline_key]
        label = f"validation (ends at {losses[-1]:.2f})"
        axes.plot(
            steps,
            losses,
            color="#1f4e8c",
            lw=1.8,
            marker="o",
            ms=4,
            label=label,
        )
        axes.axhline(
            baseline, color="#c2571a", ls="--", lw=1.4, label=f"{task.baseline} ({baseline:.2f})"
        )
        axes.set(ylabel=f"loss (nats per {task.each})", xlim=(0, steps[-1]))
        axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=150)
