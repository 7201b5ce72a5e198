"""Time pipeline schedules with stages that sleep, against the papers' formulas.

    python scripts/bench/pipeline.py [--milliseconds 25] [--out scripts/bench/results/pipeline.json]

A stage takes ``T`` for the forward of a microbatch, ``T`` for the gradient of its input and ``T`` for those of its
weights. The stages sleep, so that eight ranks need no eight cores; the tensors are tiny. They run over gloo by each of

- ``class``: torch's own schedule class and ``PipelineStage``, where the class has an engine of its own;
- ``worker``: hfscale's programs and stages, which is what ``hfscale.train_step`` runs.

Printed per schedule, ranks p and microbatches m: the step's time over the ideal one
(work plus the bubble of the formula), what an action took longer and waited, its Python's processor time, and the
most microbatches alive at once on every stage, counted by the tensors that their backward keeps.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import hfscale
from hfscale.config.schedules import schedule_of
from hfscale.extras.schedules.chrome_trace import merge_records, write_trace
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.recorder import Recorder
from hfscale.parallel.pipeline.simulation import Costs, simulate
from hfscale.parallel.pipeline.timeline import GRADIENT, Action, Order, Timeline, stage_ranks
from hfscale.parallel.pipeline.transfers import rank_programs, run_program
from hfscale.parallel.pipeline.worker import StagePlace, StageWorker
from hfscale.testing import RankPool

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.parallel.pipeline.formulas import ideal_bubble, peak_formula

GOAL = 1.05
ENGINES = ("class", "worker")
CLASSES = {"gpipe": "GPipe", "1f1b": "1F1B"}
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
_seconds = {"forward": 0.0}
_streams: dict[tuple[int, int], dist.ProcessGroup] = {}


class Alive:
    """Counts tensors saved for backward until they are freed."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def track(self) -> Tensor:
        """A new tensor that counts while it lives."""
        tensor = torch.empty(1)
        self.now += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._freed)
        return tensor

    def _freed(self) -> None:
        self.now -= 1


class InputSleep(torch.autograd.Function):
    """Identity that sleeps in the forward and in the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        time.sleep(_seconds["forward"])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(_seconds["forward"])
        return grad.clone(), None


class WeightSleep(torch.autograd.Function):
    """Identity on a weight that sleeps in its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(_seconds["forward"])
        return grad.clone(), None


class SleepingStage(nn.Module):
    """``x + weight``; the two branches meet at the sum, where torch splits the backward.

    The first stage adds its embedding's weight below the sleep, so that its own "input" part has something to reach,
    as in a model: torch runs all of the first stage's backward as weight gradient.
    """

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.embedding = nn.Parameter(torch.zeros(4)) if first else None
        self.alive = Alive()

    def forward(self, x: Tensor) -> Tensor:
        saved = self.alive.track()
        if self.embedding is not None:
            x = x + self.embedding
        return InputSleep.apply(x, saved) + WeightSleep.apply(self.weight, saved)


@dataclass(frozen=True)
class Case:
    """One line of the table.

    ``engine`` is one of :data:`ENGINES`.
    """

    schedule: str
    pp_size: int
    num_microbatches: int
    engine: str

    @property
    def virtual_stages(self) -> int:
        """Stages per rank."""
        return schedule_of(self.schedule).default_stages


def _record(stage: Any, recorder: Recorder) -> None:
    forward = stage.forward_one_chunk
    backward = stage.backward_one_chunk
    weight = stage.backward_weight_one_chunk

    def forward_one_chunk(index: int, *args: Any, **kwargs: Any) -> Any:
        with recorder.run(Action(stage.stage_index, "forward", index)):
            return forward(index, *args, **kwargs)

    def backward_one_chunk(
        index: int, *args: Any, full_backward: bool = True, **kwargs: Any
    ) -> Any:
        kind = "backward" if full_backward else "backward_input"
        with recorder.run(Action(stage.stage_index, kind, index)):
            return backward(index, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(index: int, *args: Any, **kwargs: Any) -> Any:
        with recorder.run(Action(stage.stage_index, "backward_weight", index)):
            return weight(index, *args, **kwargs)

    stage.forward_one_chunk = forward_one_chunk
    stage.backward_one_chunk = backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk


def _go_first() -> bool:
    """Run this process's threads before other programs where that is allowed: they sleep, so others lose little."""
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    except (OSError, AttributeError):  # not permitted, or not Linux
        return False
    return True


def waits(timeline: Timeline, order_run: Order) -> float:
    """Mean seconds from the moment an action had all that it needs, its rank free, to its beginning."""
    sent: dict[tuple[int, str, int], float] = {}
    for spans in timeline.ranks:
        for span, after in zip(spans, [*spans[1:], None], strict=True):
            # A pair sends when both are done.
            joined = after if span.action.paired and after else span
            sent[span.action[:3]] = joined.end
    last = max(stage_ranks(order_run))
    late = []
    for spans in timeline.ranks:
        free = 0.0
        for span in spans:
            stage, kind, index, _ = span.action
            needs = []
            if kind == "forward" and stage:
                needs = [sent[stage - 1, "forward", index]]
            elif kind in GRADIENT and stage < last:
                needs = [
                    sent[stage + 1, other, index]
                    for other in GRADIENT
                    if (stage + 1, other, index) in sent
                ]
            # Below zero: the next stage is on this rank.
            late.append(max(0.0, span.start - max([free, *needs])))
            free = span.end
    return statistics.mean(late)


def run_case(case: Case, seconds: float) -> dict[str, Any]:
    """On every rank: one step without sleep, then one with; the second's times and counts."""
    first = _go_first()
    actions = order(case.schedule, case.pp_size, case.num_microbatches, case.virtual_stages)
    recorder = Recorder()
    own = sorted(stage for stage, home in stage_ranks(actions).items() if home == dist.get_rank())
    modules = {index: SleepingStage(index == 0) for index in own}
    ours = case.engine == "worker"
    step = _our_step(actions, modules, recorder) if ours else _torch_step(case, modules, recorder)
    answer: dict[str, Any] = {}
    for pause in (0.0, seconds):
        _seconds["forward"] = pause
        for module in modules.values():
            module.alive.peak = 0
        dist.barrier()
        recorder.start()
        begin = time.perf_counter()
        cpu = time.process_time()
        step()
        answer = {
            "first": first,
            "begin": begin,
            "end": time.perf_counter(),
            "cpu": time.process_time() - cpu,
            "record": recorder.record,
            "peak": {index: module.alive.peak for index, module in modules.items()},
        }
    return answer


def _torch_step(
    case: Case, modules: dict[int, SleepingStage], recorder: Recorder
) -> Callable[[], object]:
    """A step over torch's stages."""
    count = case.pp_size * case.virtual_stages
    x = torch.zeros(1, 4)
    stages = []
    for index, module in modules.items():
        # Given both shapes, torch does not run the stages once more to find them out.
        takes = x.clone().requires_grad_(index > 0)
        gives = x.clone().requires_grad_()
        stage = PipelineStage(
            module, index, count, torch.device("cpu"), input_args=takes, output_args=gives
        )
        _record(stage, recorder)
        stages.append(stage)
    loss: Any = lambda result, _: result.sum()  # noqa: E731
    runner = get_schedule_class(CLASSES[case.schedule])(
        stages[0], case.num_microbatches, loss_fn=loss
    )
    batch = torch.zeros(case.num_microbatches, 4)
    arguments = (batch,) if 0 in modules else ()
    keywords = {"target": batch} if count - 1 in modules else {}
    return partial(runner.step, *arguments, **keywords, return_outputs=False)


def _our_step(
    actions: Order, modules: dict[int, SleepingStage], recorder: Recorder
) -> Callable[[], None]:
    """A step over hfscale's stages."""
    if not _streams:  # one way between two ranks each, as in a mesh; made once by all ranks
        ways = permutations(range(dist.get_world_size()), 2)
        _streams.update({way: dist.new_group(sorted(way)) for way in ways})
    homes = stage_ranks(actions)
    x = torch.zeros(1, 4)
    ranks = tuple(homes[stage] for stage in range(len(homes)))

    def compute(module: SleepingStage, last: bool, arrived: Tensor | None, _: int) -> Tensor:
        result: Tensor = module(x if arrived is None else arrived)
        return result.sum() if last else result

    workers = []
    for index, module in modules.items():
        place = StagePlace(index, ranks, dist.group.WORLD, _streams, torch.device("cpu"))
        last = index == len(ranks) - 1
        workers.append(
            StageWorker(
                place,
                partial(compute, module, last),
                lambda _: (x.shape, x.dtype),
                module.parameters,
            )
        )
        workers[-1].recorder = recorder
    program = rank_programs(actions)[dist.get_rank()]

    def step() -> None:
        run_program(program, {worker.index: worker for worker in workers})
        for worker in workers:
            worker.finish()

    return step


def measure(case: Case, seconds: float, pool: RankPool, traces: Path | None) -> dict[str, Any]:
    """One line of the table."""
    p = case.pp_size
    m = case.num_microbatches
    v = case.virtual_stages
    costs = Costs(seconds, 2 * seconds, seconds, seconds)
    actions = order(case.schedule, p, m, v)
    planned = simulate(actions, costs, case.schedule)
    bubble = ideal_bubble(case.schedule, p, m, v, costs)
    if bubble is None:  # too few microbatches for the paper's formula
        ideal = planned.makespan
        source = "simulated"
    else:
        # Its formula is a rank's view, without the stagger.
        fill = (p - 1) * seconds if case.schedule == "zbv" else 0.0
        ideal = planned.work * (1 + bubble) + fill
        source = "formula"
    answers = pool.run(run_case, case, seconds)
    paired = {action[:3] for rank in actions for action in rank if action.paired}
    for answer in answers:  # a rank notes what it computes, not what that is paired with
        events = answer["record"].events
        events[:] = [
            (action._replace(paired=action[:3] in paired), *times) for action, *times in events
        ]
    measured = merge_records([answer["record"] for answer in answers], case.schedule, m)
    if traces:
        write_trace(traces / f"{case.schedule}-{case.engine}-p{p}-m{m}.json", measured)
    step = max(answer["end"] for answer in answers) - min(answer["begin"] for answer in answers)
    peaks = {stage: peak for answer in answers for stage, peak in answer["peak"].items()}
    peak = [peaks[stage] for stage in range(p * v)]
    busy = [sum(span.end - span.start for span in spans) for spans in measured.ranks]
    return {
        "schedule": case.schedule,
        "engine": case.engine,
        "p": p,
        "m": m,
        "v": v,
        "milliseconds": 1000 * seconds,
        "ideal_seconds": round(ideal, 4),
        "ideal_from": source,
        "step_seconds": round(step, 4),
        "ratio": round(step / ideal, 4),
        # Where the excess is: longer actions (sleeps that oversleep, Python), and waits between them.
        "action_excess_ms": round(1e3 * (sum(busy) / p - planned.work) / len(actions[0]), 3),
        "wait_ms": round(1e3 * waits(measured, actions), 3),
        "cpu_ms": round(
            1e3 * statistics.mean(answer["cpu"] for answer in answers) / len(actions[0]), 3
        ),
        "priority": "real time" if all(answer["first"] for answer in answers) else "normal",
        "peak": peak,
        "peak_planned": list(planned.peak_live()),
        "peak_formula": list(peak_formula(case.schedule, p, m, v) or ()),
    }


def cases(sizes: list[int], schedules: list[str], engines: list[str]) -> list[Case]:
    """Every schedule at m = p, 2p, 4p, where it takes so few microbatches."""
    return [
        Case(schedule, p, factor * p, engine)
        for p in sizes
        for schedule in schedules
        for engine in engines
        if engine != "class" or schedule in CLASSES
        for factor in (1, 2, 4)
        if not (schedule == "dualpipev" and factor == 1)
    ]


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--milliseconds", type=float, default=25.0, help="forward of one microbatch on one stage"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--traces", type=Path, help="folder to write each run's trace to")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    rows = []
    print(
        f"{'schedule':24}{'engine':9}{'p':>3}{'m':>4}{'v':>3}{'ideal s':>9}{'step s':>9}{'ratio':>8}",
        end="",
    )
    print("   ms per action: longer, waiting, cpu; peak of stages")
    for p in arguments.ranks:
        with RankPool(p, timeout=600) as pool:
            for case in cases([p], arguments.schedules, arguments.engines):
                row = measure(case, arguments.milliseconds / 1000, pool, arguments.traces)
                rows.append(row)
                mark = " " if row["ratio"] <= GOAL else "!"
                same = (
                    "as planned"
                    if row["peak"] == row["peak_planned"]
                    else f"planned {row['peak_planned']}"
                )
                print(
                    f"{row['schedule']:24}{row['engine']:9}{row['p']:3}{row['m']:4}{row['v']:3}{row['ideal_seconds']:9.3f}"
                    f"{row['step_seconds']:9.3f}{row['ratio']:8.3f}{mark} {row['action_excess_ms']:6.2f}"
                    f"{row['wait_ms']:6.2f}{row['cpu_ms']:6.2f}  {row['peak']} {same}",
                    flush=True,
                )
    report = {
        "what": "torch's engines over gloo, sleeping stages of torch's and of hfscale's; one step after a warm-up step",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": [
            round(value, 1) for value in os.getloadavg()
        ],  # other programs of the machine included
        "goal": GOAL,
        "versions": {
            "torch": torch.__version__,
            "hfscale": hfscale.__version__,
            "python": platform.python_version(),
        },
        "seconds": round(time.perf_counter() - started, 1),
        "worst": max(row["ratio"] for row in rows),
        "worst by engine": {
            engine: max(row["ratio"] for row in rows if row["engine"] == engine)
            for engine in arguments.engines
        },
        "results": rows,
    }
    print(
        f"worst ratio {report['worst']} ({report['worst by engine']}), goal {GOAL}, {report['seconds']} s"
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
