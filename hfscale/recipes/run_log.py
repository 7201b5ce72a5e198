"""What a run shows and writes while it trains, and the figure of its losses."""

import json
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from omegaconf import OmegaConf
from tqdm import tqdm

import hfscale

from .._compat.torch_device import accelerators
from .main_process import is_main, largest
from .profile import Profile
from .profiled_steps import steps_to_profile
from .schema import Recipe
from .tasks import TEXT, Task, task_of
from .tracking import CsvTracker, start_trackers


def peak_memory() -> int:
    """Bytes at the peak, of the process with most: GPU memory on GPUs, resident memory on CPU. Call on every rank."""
    if accelerators().is_available() and accelerators().max_memory_allocated():
        return int(largest(accelerators().max_memory_allocated()))
    unit = 1 if sys.platform == "darwin" else 1024
    return int(largest(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit))


class RunLog:
    """The progress bar and ``metrics.jsonl`` on the main process; nothing on the others."""

    def __init__(
        self,
        directory: Path,
        name: str,
        steps: int,
        baseline: float,
        trackers: Sequence[Any] = (),
        profile: Profile | None = None,
        task: Task = TEXT,
    ) -> None:
        self.path = directory / "metrics.jsonl"
        self.baseline, self._task = baseline, task
        self._active, self._trackers, self._profile = is_main(), trackers, profile
        self._shown: dict[str, str] = {}
        self._loads: hfscale.ExpertLoadHistory | None = None
        self._bar = tqdm(
            total=steps, desc=name, unit="step", disable=not self._active, dynamic_ncols=True, mininterval=1.0
        )
        if self._active:
            directory.mkdir(parents=True, exist_ok=True)
            self.path.touch()

    @classmethod
    def of(cls, recipe: Recipe, baseline: float) -> "RunLog":
        """The log of a run, which begins anew unless it has a saved state to go on from.

        Args:
            baseline: what the validation loss is to be compared with.
        """
        trackers, profile, directory = [], None, recipe.directory
        if is_main():
            directory.mkdir(parents=True, exist_ok=True)
            trackers = start_trackers(recipe.tracking, recipe.name, directory, asdict(recipe))
        if recipe.profile:
            profile = Profile(steps_to_profile(recipe.profile, recipe.training.steps), directory / "profile")
        log = cls(directory, recipe.name, recipe.training.steps, baseline, trackers, profile, task_of(recipe.data))
        if recipe.saved_state is None and is_main():
            log.path.write_text("")
            shutil.rmtree(recipe.directory / "state", ignore_errors=True)  # of an earlier run
            OmegaConf.save(OmegaConf.structured(recipe), recipe.directory / "recipe.yaml")
        return log

    def go_on(self, step: int) -> None:
        """Go on behind ``step``; what the run wrote after it is forgotten."""
        self._bar.n = step
        self._bar.refresh()
        if not self._active:
            return
        for tracker in self._trackers:
            if isinstance(tracker, CsvTracker):
                tracker.go_on(step)
        experts = self.path.with_name("experts.jsonl")
        for path in filter(Path.is_file, (self.path, experts)):
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
        if experts.is_file():
            self._loads = hfscale.ExpertLoadHistory.read(experts)
            self._loads.path = experts

    def stepped(self) -> None:
        """One optimizer step is done."""
        self._bar.update()
        if self._profile is not None:
            self._profile.step()

    def trained(self, step: int, **numbers: float) -> None:
        """Training since the last call: mean ``loss``, and ``lr``, ``grad_norm``, ``tokens_per_second``, ``memory`` at
        the peak, ``tokens`` and ``seconds`` so far, ``mfu`` where it is known.
        """
        self._write({"step": step, **numbers})
        speed, memory = f"{numbers['tokens_per_second']:,.0f}", f"{numbers['memory'] / 2**30:.2f} GiB"
        self._show(loss=f"{numbers['loss']:.3f}", tok_s=speed, mem=memory)

    def routed(self, step: int, load: hfscale.ExpertLoad) -> None:
        """How busy the experts of a mixture were in a step; ``experts.jsonl`` has every expert's tokens."""
        if not self._active:
            return
        if self._loads is None:
            path = self.path.with_name("experts.jsonl")
            path.write_text("")
            self._loads = hfscale.ExpertLoadHistory(path)
        self._loads.record(step, load)
        metrics = load.metrics()
        self._write({"step": step, **metrics})
        self._show(busiest=f"{metrics['experts/max_over_mean']:.2f}x")

    def plot_loads(self) -> None:
        """Draw ``experts.png``, where a mixture was trained."""
        if self._loads is not None:
            self._loads.plot(self.path.with_name("experts.png"))

    def evaluated(self, step: int, validation_loss: float, accuracy: float | None = None) -> None:
        """The loss on the validation sequences after ``step`` steps, beside the task's baseline: in text, what the
        frequencies of tokens give.
        """
        key, right = self._task.baseline.replace(" ", "_"), ""
        record = {"step": step, "validation_loss": validation_loss, key: self.baseline}
        self._show(val=f"{validation_loss:.3f}")
        if accuracy is not None:
            record["validation_accuracy"] = accuracy
            right = f", accuracy {accuracy:.1%}"
        self._write(record)
        if self._active:
            tqdm.write(
                f"step {step}: validation loss {validation_loss:.4f}, {self._task.baseline} {self.baseline:.4f} "
                f"(nats per {self._task.each}){right}"
            )

    def checked(self, check: hfscale.SaveCheck) -> None:
        """What a save of the run takes."""
        if self._active:
            tqdm.write(
                f"a state takes {check.bytes / 2**30:.2f} of {check.free / 2**30:.2f} GiB that are free, "
                f"{check.save_seconds:.1f} s to save and {check.load_seconds:.1f} s to load"
            )

    def merged(self, step: int, validation_loss: float) -> None:
        """The loss on the validation sequences once the adapter is added to the base."""
        self._write({"step": step, "merged_validation_loss": validation_loss})

    def plot(self, target: Path, title: str) -> None:
        """Draw the losses so far."""
        plot_losses(self.path, target, title, self.baseline, self._task)

    def close(self) -> None:
        """End the progress bar, and what is left of a profile."""
        self._bar.close()
        if self._profile is not None:
            self._profile.stop()

    def finish(self) -> None:
        """Nothing comes any more."""
        for tracker in self._trackers:
            tracker.finish()

    def _show(self, **values: str) -> None:
        self._shown.update(values)
        self._bar.set_postfix(self._shown, refresh=False)

    def _write(self, record: dict[str, Any]) -> None:
        if self._active:
            with self.path.open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        for tracker in self._trackers:
            tracker.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of ``metrics.jsonl``: those of training, and those of evaluation."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [r for r in records if "loss" in r], [r for r in records if "validation_loss" in r]


def plot_losses(metrics: Path, target: Path, title: str, baseline: float, task: Task = TEXT) -> None:
    """Training and validation loss over the steps, and the task's baseline as the line to get under."""
    training, evaluation = read_metrics(metrics)
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in training], [r["loss"] for r in training], color="#9ab8dc", lw=1.8, label="train")
    steps, losses = [r["step"] for r in evaluation], [r["validation_loss"] for r in evaluation]
    axes.plot(steps, losses, color="#1f4e8c", lw=1.8, marker="o", ms=4, label=f"validation (ends at {losses[-1]:.2f})")
    axes.axhline(baseline, color="#c2571a", ls="--", lw=1.4, label=f"{task.baseline} ({baseline:.2f})")
    axes.set(title=title, xlabel="optimizer step", ylabel=f"loss (nats per {task.each})", xlim=(0, steps[-1]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(target, dpi=150)
