"""Rehearse failures: kill and stop the ranks of a recipe's run at random, and compare its end with an undisturbed run.

torch's elastic agent (``torchrun --max-restarts``) starts the ranks again, as it would those of any job. What happens
when is drawn from a seed; what the run does is read from its ``metrics.jsonl``, so nothing in it knows of the drill.
"""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..config.parallel import ParallelConfig
from .launch import prepare_launch
from .read import read_recipe
from .run_log import read_metrics
from .schema import Recipe, RecipeError

KINDS = ("rank", "save", "load", "all", "stop")
"""A rank is killed in a step, in a save, or while it starts again; all are killed; one is stopped for a while."""
_STOPPED, _LOAD, _LOOK = 3.0, 8.0, 0.02  # seconds


@dataclass(frozen=True)
class Strike:
    """Hold what was done to a run, and what came of it."""

    kind: str
    rank: int
    step: int  # the last one before it
    lost: int  # steps that were done again
    seconds: float  # from the last signal to the end of the next step that was new to the restarted ranks


@dataclass
class Drill:
    """Hold the results of a drill; ``undisturbed`` and ``seconds`` are those of whole runs, starts included."""

    undisturbed: float
    seconds: float = 0.0
    strikes: list[Strike] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"{'kind':6}{'rank':>6}{'after step':>12}{'steps lost':>12}{'s to next step':>16}"]
        rows += [f"{s.kind:6}{s.rank:6}{s.step:12}{s.lost:12}{s.seconds:16.1f}" for s in self.strikes]
        times = [strike.seconds for strike in self.strikes if strike.kind != "stop"] or [0.0]
        lost, share = [strike.lost for strike in self.strikes], self.undisturbed / max(self.seconds, 1e-9)
        return "\n".join(
            [
                *rows,
                "",
                f"from a kill to the next step: median {median(times):.1f} s, at most {max(times):.1f} s",
                f"steps lost: median {median(lost or [0])}, at most {max(lost, default=0)}",
                f"effective time: {share:.1%} ({self.undisturbed:.0f} s undisturbed, {self.seconds:.0f} s disturbed)",
                f"the end differs from the undisturbed run's: {', '.join(self.differences)}"
                if self.differences
                else "the end equals that of the undisturbed run, bit for bit",
            ]
        )


def drill(source: str, overrides: Sequence[str], kills: int, seed: int) -> Drill:
    """Run a recipe twice, once undisturbed and once with ``kills`` strikes, as ``NAME-drill-plain`` and ``NAME-drill``.

    Raises:
        RecipeError: a run failed by itself, or ended before all strikes.
    """
    recipe = read_recipe(source, overrides)
    every = recipe.training.save_every or max(1, recipe.training.steps // 10)
    if recipe.training.steps < 2 * kills:
        raise RecipeError(f"{kills} kills need at least {2 * kills} steps, and training.steps={recipe.training.steps}")
    fixed = [*overrides, "training.log_every=1", f"training.save_every={every}", "training.resume=true"]
    plain, struck = (_Run(source, [*fixed, f"name={recipe.name}-{end}"], kills) for end in ("drill-plain", "drill"))
    found = Drill(plain.finish())
    chance, steps = random.Random(seed), recipe.training.steps
    for number in range(kills):
        due = 1 + int((number + chance.random()) * 0.9 * (steps - 1) / kills)
        found.strikes.append(struck.strike(chance.choice(KINDS), due, chance))
    found.seconds = struck.finish()
    found.differences = [name for name, value in plain.end().items() if struck.end().get(name) != value]
    return found


class _Run:
    """One run of a recipe under torch's elastic agent, from its start."""

    def __init__(self, source: str, overrides: list[str], kills: int) -> None:
        self._recipe: Recipe = read_recipe(source, overrides)
        self._ranks = ParallelConfig(**self._recipe.parallel).total_size
        self._line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        self._line += [str(self._ranks), "--max-restarts", str(2 * kills), "-m", "hfscale", "train", source, *overrides]
        self._agent: subprocess.Popen[str] | None = None
        self._begun = 0.0

    def _start(self) -> "subprocess.Popen[str]":
        if self._agent is None:
            prepare_launch(self._ranks)
            shutil.rmtree(self._recipe.directory, ignore_errors=True)
            self._recipe.directory.mkdir(parents=True)
            self._begun = time.monotonic()
            with (self._recipe.directory / "drill.log").open("w") as log:
                self._agent = subprocess.Popen(self._line, stdout=log, stderr=log, text=True)
        return self._agent

    def finish(self) -> float:
        """Let it run to its end; return the seconds that the whole run took."""
        if code := self._start().wait():
            raise RecipeError(f"the run ended with exit code {code}: {self._recipe.directory}/drill.log says why")
        return time.monotonic() - self._begun

    def end(self) -> dict[str, Any]:
        """Return the checksum of each file of weights at the run's end, and its losses by step."""
        root = self._recipe.directory
        weights = {str(path.relative_to(root)): path for path in sorted(root.rglob("*.safetensors"))}
        found: dict[str, Any] = {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in weights.items()
            if not name.startswith("state")
        }
        training, evaluation = read_metrics(self._recipe.metrics)
        losses = [[r["step"], r["loss"], r["grad_norm"]] for r in training]
        return {**found, "losses": losses, "validation": [[r["step"], r["validation_loss"]] for r in evaluation]}

    def strike(self, kind: str, due: int, chance: random.Random) -> Strike:
        """Wait for step ``due``, strike, and wait until the ranks have done a step again."""
        self._start()
        self._wait(lambda: self._step() >= due)
        if kind == "save":
            self._wait(lambda: any((self._recipe.directory / "state" / ".incomplete").glob("*")))
        time.sleep(chance.uniform(0, 0.1))
        rank, step = chance.randrange(self._ranks), self._step()
        if kind == "stop":
            process = self._pids()[rank]
            os.kill(process, signal.SIGSTOP)
            time.sleep(_STOPPED)
            os.kill(process, signal.SIGCONT)
            begun, resumed = time.monotonic(), step
        else:
            begun = self._kill(range(self._ranks) if kind == "all" else [rank])
            if kind == "load":
                time.sleep(chance.uniform(0, _LOAD))
                begun = self._kill([rank])
            step, changed = self._step(), self._changed()
            self._wait(lambda: self._changed() != changed)  # steps behind the last save have been taken out
            resumed = self._step()
        self._wait(lambda: self._step() > resumed)
        return Strike(kind, rank, step, max(step - resumed, 0), time.monotonic() - begun)

    def _kill(self, ranks: Iterable[int]) -> float:
        """Kill ranks; return when, once all have been started again."""
        before, begun = self._pids(), time.monotonic()
        for rank in ranks:
            os.kill(before[rank], signal.SIGKILL)
        self._wait(lambda: len(now := self._pids()) == self._ranks and not set(now.values()) & set(before.values()))
        return begun

    def _wait(self, come: Callable[[], bool]) -> None:
        while not come():
            if self._start().poll() is not None:
                raise RecipeError(f"the run ended before all strikes: {self._recipe.directory}/drill.log says why")
            time.sleep(_LOOK)

    def _step(self) -> int:
        """Return the last step that was logged."""
        try:
            training, _ = read_metrics(self._recipe.metrics)
        except (OSError, ValueError):  # it does not exist yet, or is being written
            return 0
        return int(training[-1]["step"]) if training else 0

    def _changed(self) -> int:
        return self._recipe.metrics.stat().st_mtime_ns if self._recipe.metrics.exists() else 0

    def _pids(self) -> dict[int, int]:
        """Return the process of each rank that lives: children of the agent."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == self._start().pid:
                    names = dict(
                        each.split("=", 1) for each in (path / "environ").read_text().split("\0") if "=" in each
                    )
                    found[int(names["RANK"])] = int(path.name)
            except (OSError, KeyError, ValueError):  # it has ended, or is no rank
                continue
        return found
