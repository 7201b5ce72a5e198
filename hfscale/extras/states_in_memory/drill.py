"""Rehearse failures: kill and stop ranks of a run at random, and compare its results with an undisturbed run.

torch's elastic agent (``torchrun --max-restarts``) starts the ranks again. Kinds and moments are drawn from a seed. The
drill reads the run's progress from its ``metrics.jsonl``, so the run itself needs no code for the drill.
"""

import hashlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ...config.environment import memory_of
from ...config.parallel import ParallelConfig
from ...plan.columns import aligned
from ...recipes.launch import prepare_launch
from ...recipes.read import read_recipe
from ...recipes.run_log import read_metrics
from ...recipes.schema import RecipeError

KINDS = ("rank", "save", "load", "all", "node", "stop", "full")
"""Kinds of strikes: kill one rank in a step, in a save, or while it starts again (load); kill all ranks with their
parents, or also the launcher (node), which a scheduler would restart; stop one rank for a while; limit the size of one
rank's files, as if its disk were full.
"""
# seconds
_STOPPED = 3.0
_LOAD = 4.0
_LOOK = 0.02
_FULL = 100  # bytes that a rank can still write to a file
_PARENTS = ("all", "node")  # kinds of strikes that also kill parent processes


class Strike(NamedTuple):
    """Describe one strike of the drill against a run: which rank was killed or stopped, when, and what was lost."""

    kind: str
    rank: int
    step: int  # the last step before the strike
    lost: int  # number of steps that were lost
    seconds: float  # from the last signal to the end of the restarted ranks' next step


def drill(
    source: str,
    overrides: Sequence[str],
    kills: int,
    seed: int,
) -> tuple[str, bool]:
    """Run a recipe as ``NAME-drill-plain``, and again as ``NAME-drill`` with ``kills`` strikes against its ranks.

    Returns:
        A report, and whether both runs have the same results: weights bit for bit, and losses of all steps.

    Raises:
        RecipeError: a run failed by itself, or ended before all strikes were done.
    """
    recipe = read_recipe(source, overrides)
    steps = recipe.training.steps
    every = recipe.training.save_every or max(1, recipe.training.steps // 10)
    if steps < 2 * kills:
        raise RecipeError(
            f"{kills} kills need at least {2 * kills} training steps, but training.steps={steps}: use more steps, or "
            "fewer kills"
        )
    fixed = [
        *overrides,
        "training.log_every=1",
        f"training.save_every={every}",
        "training.resume=true",
    ]
    fixed += [f"training.memory_every={recipe.training.memory_every or max(1, every // 5)}"]
    fixed += [f"training.restarts={recipe.training.restarts or 2 * kills}"]
    plain = _Run(source, [*fixed, f"name={recipe.name}-drill-plain"], kills)
    undisturbed = plain.finish()
    imports = [_imports(plain.ranks)]
    struck = _Run(source, [*fixed, f"name={recipe.name}-drill"], kills)
    chance = random.Random(seed)
    strikes = []
    for number in range(kills):
        due = 1 + int((number + chance.random()) * 0.9 * (steps - 1) / kills)
        strikes.append(struck.strike(chance.choice(KINDS), due, chance))
    disturbed = struck.finish()
    imports.append(_imports(plain.ranks))
    after = struck.end()
    wrong = [name for name, value in plain.end().items() if after.get(name) != value]
    return _report(strikes, undisturbed, disturbed, imports, wrong), not wrong


def _report(
    strikes: Sequence[Strike],
    undisturbed: float,
    disturbed: float,
    imports: Sequence[float],
    wrong: Sequence[str],
) -> str:
    rows = [("strike", "rank", "after step", "steps lost", "seconds to the next step")]
    rows += [(s.kind, str(s.rank), str(s.step), str(s.lost), f"{s.seconds:.1f}") for s in strikes]
    times = [s.seconds for s in strikes if s.kind != "stop"] or [0.0]
    lost = [s.lost for s in strikes]
    kinds = {kind: [s.seconds for s in strikes if s.kind == kind] for kind in KINDS}
    of_kinds = [
        f"{kind} {median(seconds):.1f} ({len(seconds)})"
        for kind, seconds in kinds.items()
        if seconds
    ]
    end = (
        f"the end differs in {', '.join(wrong)}"
        if wrong
        else "the end equals the undisturbed run's, bit for bit"
    )
    lines = [
        *aligned(rows, left=(0,)),
        f"from a kill to the next step: median {median(times):.1f} s, at most {max(times):.1f} s",
        f"medians by kind: {', '.join(of_kinds)}",
        f"imports alone: {min(imports):.1f} to {max(imports):.1f} s, before and after",
        f"steps lost: median {median(lost):g}, at most {max(lost)}",
        f"effective time: {undisturbed / disturbed:.1%} ({undisturbed:.0f} s undisturbed, {disturbed:.0f} s disturbed)",
    ]
    return "\n".join([*lines, end])


class _Run:
    """Run a recipe under torch's elastic agent, which restarts killed ranks; ``finish`` returns the seconds it took,
    ``end`` its results.
    """

    def __init__(self, source: str, overrides: list[str], kills: int) -> None:
        recipe = read_recipe(source, overrides)
        self._directory = recipe.directory
        self._metrics = recipe.metrics
        self.ranks = ParallelConfig(**recipe.parallel).total_size
        prepare_launch(self.ranks)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        agent = ["torch.distributed.run", "--standalone", "--max-restarts", str(2 * kills)]
        self._line = [
            *agent,
            "--nproc-per-node",
            str(self.ranks),
            "-m",
            "hfscale",
            "train",
            source,
            *overrides,
        ]
        self._begun = time.monotonic()
        self._launch()

    def _launch(self) -> None:
        with (self._directory / "drill.log").open("a") as log:
            self._agent = subprocess.Popen(
                [sys.executable, "-m", *self._line], stdout=log, stderr=log
            )

    def finish(self) -> float:
        if code := self._agent.wait():
            raise RecipeError(
                f"the training run failed with exit code {code}: read {self._directory}/drill.log for the reason"
            )
        return time.monotonic() - self._begun

    def end(self) -> dict[str, Any]:
        files = {
            str(path.relative_to(self._directory)): path
            for path in self._directory.rglob("*.safetensors")
        }
        weights = {
            name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
        }
        outcome: dict[str, Any] = {
            name: digest for name, digest in weights.items() if not name.startswith("state")
        }
        training, evaluation = read_metrics(self._metrics)
        outcome["losses"] = [(line["step"], line["loss"], line["grad_norm"]) for line in training]
        return outcome | {
            "validation": [(line["step"], line["validation_loss"]) for line in evaluation]
        }

    def strike(self, kind: str, due: int, chance: random.Random) -> Strike:
        """Wait for step ``due``, strike, and wait until the ranks have done another step."""
        self._wait(lambda: self._step() >= due)
        if kind == "save":
            disk = self._directory / "state"
            self._wait(
                lambda: (
                    any(disk.glob(".incomplete/*")) or any(memory_of(disk).glob("*/.*.incomplete"))
                )
            )
        time.sleep(chance.uniform(0, 0.1) * (kind != "save"))
        rank = chance.randrange(self.ranks)
        step = resumed = self._step()
        if kind == "stop":
            process = self._pids()[rank]
            with suppress(ProcessLookupError):  # the process has ended
                os.kill(process, signal.SIGSTOP)
                time.sleep(_STOPPED)
                os.kill(process, signal.SIGCONT)
            begun = time.monotonic()
        else:
            begun = self._kill(range(self.ranks) if kind in _PARENTS else [rank], kind)
            if kind == "load":
                time.sleep(chance.uniform(0, _LOAD))
                begun = self._kill([rank], kind)
            step = self._step()
            written = self._metrics.stat().st_mtime_ns
            # wait until the resumed run has removed the metrics of lost steps
            self._wait(lambda: self._metrics.stat().st_mtime_ns != written)
            resumed = self._step()
        self._wait(lambda: self._step() > resumed)
        return Strike(
            kind,
            rank,
            step,
            max(step - resumed, 0),
            time.monotonic() - begun,
        )

    def _kill(self, ranks: Iterable[int], kind: str) -> float:
        """Kill ranks; return the time of the kill, once all killed ranks have been started again."""
        before, begun = self._pids(), time.monotonic()
        if kind == "node":
            self._agent.kill()
            self._agent.wait()
        for rank in ranks:
            if kind == "full":
                with suppress(ProcessLookupError):
                    resource.prlimit(
                        before[rank], resource.RLIMIT_FSIZE, (_FULL, resource.RLIM_INFINITY)
                    )
                self._wait(lambda: not Path(f"/proc/{before[rank]}").exists())  # noqa: B023
                begun = time.monotonic()
            else:
                with suppress(ProcessLookupError):
                    os.kill(
                        self._parents[before[rank]] if kind in _PARENTS else before[rank],
                        signal.SIGKILL,
                    )
        if kind == "node":
            self._launch()
        self._wait(
            lambda: (
                len(now := self._pids()) == self.ranks and not {*now.values()} & {*before.values()}
            )
        )
        return begun

    def _wait(self, come: Callable[[], bool]) -> None:
        while not come():
            if self._agent.poll() is not None:
                raise RecipeError(
                    "the training run ended before the drill had killed all the processes it was to kill: read "
                    f"{self._directory}/drill.log for the reason"
                )
            time.sleep(_LOOK)

    def _step(self) -> int:
        logged = (
            re.findall(r'"step": (\d+), "loss"', self._metrics.read_text())
            if self._metrics.exists()
            else []
        )
        return int(logged[-1]) if logged else 0

    def _pids(self) -> dict[int, int]:
        """Map each rank to its process: a grandchild of the agent; its parent process is recorded too."""
        pids = {}
        self._parents = {
            c: parent for parent in _children(self._agent.pid) for c in _children(parent)
        }
        for child in self._parents:
            with suppress(OSError, KeyError):  # the process has ended, or is no rank
                text = Path(f"/proc/{child}/environ").read_text()
                pids[int(dict(each.partition("=")[::2] for each in text.split("\0"))["RANK"])] = (
                    child
                )
        return pids


def _children(process: int) -> list[int]:
    with suppress(OSError):  # the process has ended
        return [
            int(c)
            for path in Path(f"/proc/{process}/task").glob("*/children")
            for c in path.read_text().split()
        ]
    return []


def _imports(ranks: int) -> float:
    """Return the seconds that all ranks together take for their imports, started at the same time."""
    begun = time.monotonic()
    every = [
        subprocess.Popen([sys.executable, "-c", "import hfscale.recipes.run"]) for _ in range(ranks)
    ]
    for module in every:
        module.wait()
    return time.monotonic() - begun
