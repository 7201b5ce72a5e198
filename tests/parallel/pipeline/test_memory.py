"""What real stages keep alive: counted by what autograd saves, and by the memory of the streams they send."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import hfscale
from hfscale import ParallelConfig
from hfscale.config.schedules import schedule_of
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.timeline import peak_live
from hfscale.parallel.pipeline.worker import StageWorker
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from tests.tiny_models import tiny

from .formulas import peak_formula

Pools = Callable[[int], RankPool]
TOKENS = 10


@dataclass
class Peak:
    """The most of one stage that was alive at once, in microbatches."""

    graphs: int = 0
    streams: int = 0
    gradients: int = 0
    kept: list[int] = field(default_factory=list)
    """microbatches of which anything is alive after the step"""


class _Saved:
    """Holds a tensor for autograd, which lets go of it with the node that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        # An output that is saved would else keep the node that keeps it.
        self.tensor = tensor.detach()


class Watch:
    """Counts what of one stage's microbatches is alive."""

    def __init__(self, worker: StageWorker) -> None:
        self.peak = Peak()
        self._saved: Counter[int] = Counter()
        self._streams: list[StorageWeakRef] = []
        self._gradients: list[StorageWeakRef] = []
        self._compute = worker._compute
        self._returns = worker.send_gradient
        self._worker: Any = worker
        self._worker._compute, self._worker.send_gradient = self.compute, self.returns

    def compute(self, arrived: Tensor | None, microbatch: int) -> Tensor:
        with saved_tensors_hooks(partial(self._pack, microbatch), lambda saved: saved.tensor):
            output = self._compute(arrived, microbatch)
        self._streams.append(StorageWeakRef(output.untyped_storage()))
        self.peak.streams = max(self.peak.streams, _alive(self._streams))
        return output

    def returns(self, microbatch: int) -> None:
        gradient = self._worker.returning.get(microbatch)
        if gradient is not None:
            self._gradients.append(StorageWeakRef(gradient.untyped_storage()))
        del gradient
        self._returns(microbatch)
        self.peak.gradients = max(self.peak.gradients, _alive(self._gradients))

    def finish(self) -> Peak:
        self.peak.kept = sorted(+self._saved)
        self.peak.kept += [-1] * (_alive(self._streams) + _alive(self._gradients))
        self._worker._compute, self._worker.send_gradient = self._compute, self._returns
        return self.peak

    def _pack(self, microbatch: int, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved[microbatch] += 1
        weakref.finalize(saved, self._freed, microbatch)
        self.peak.graphs = max(self.peak.graphs, len(+self._saved))
        return saved

    def _freed(self, microbatch: int) -> None:
        self._saved[microbatch] -= 1


def _alive(storages: list[StorageWeakRef]) -> int:
    return sum(not storage.expired() for storage in storages)


def watch(
    schedule: str, pp_size: int, microbatches: int, evaluates: bool = False
) -> dict[int, Peak]:
    """Per stage of this rank, its peak in the second of two steps. No garbage is collected: nothing is left to that."""
    virtual = schedule_of(schedule).default_stages
    layout = ParallelConfig(
        pp_size=pp_size,
        pipeline_schedule=schedule,
        virtual_stages=virtual,
        num_microbatches=microbatches,
    )
    model = hfscale.from_config(tiny("llama", num_hidden_layers=pp_size * virtual), parallel=layout)
    pipeline = runtime_of(model).executor
    assert pipeline is not None
    ids = torch.arange(microbatches * TOKENS).view(microbatches, TOKENS) % 60
    batch = {"input_ids": ids, "labels": ids}
    step = hfscale.eval_step if evaluates else hfscale.train_step
    step(model, batch)
    watches = {worker.index: Watch(worker) for worker in pipeline.workers}
    gc.disable()
    try:
        step(model, batch)
    finally:
        gc.enable()
    return {stage: each.finish() for stage, each in watches.items()}


CASES = [
    ("1f1b", 4, 8),
    ("1f1b", 4, 2),
    ("interleaved1f1b", 4, 8),
    ("interleaved_zero_bubble", 4, 8),
    ("zbv", 4, 12),
    ("dualpipev", 4, 10),
    ("1f1b", 2, 6),
    ("1f1b", 2, 1),
    ("gpipe", 2, 5),
    ("looped_bfs", 2, 4),
    ("zbv", 2, 6),
]


@pytest.mark.daily("1f1b-4-8", "zbv-2-6", "looped_bfs-2-4", "gpipe-2-5", "1f1b-4-2")
@pytest.mark.parametrize(("schedule", "pp_size", "microbatches"), CASES)
def test_microbatches_alive_are_those_of_the_order(
    pools: Pools, schedule: str, pp_size: int, microbatches: int
) -> None:
    virtual = schedule_of(schedule).default_stages
    ranks = pools(pp_size).run(watch, schedule, pp_size, microbatches)
    peaks = [peak for _, peak in sorted(item for rank in ranks for item in rank.items())]
    planned = peak_live(order(schedule, pp_size, microbatches, virtual))
    assert tuple(peak.graphs for peak in peaks) == planned
    formula = peak_formula(schedule, pp_size, microbatches, virtual)
    assert formula in (None, planned)
    assert not any(peak.kept for peak in peaks)
    # A stream that was sent goes when its gradient is back, so there are never more than microbatches alive.
    assert tuple(peak.streams for peak in peaks) == planned
    # Gradients go back two at a time, however many there are.
    assert all(peak.gradients <= 2 for peak in peaks)


def test_evaluation_keeps_nothing(pools: Pools) -> None:
    for rank in pools(2).run(watch, "1f1b", 2, 6, evaluates=True):
        for stage, peak in rank.items():
            assert (peak.graphs, peak.kept) == (0, [])
            # Two under way, and the next one; the last stage's are its losses.
            assert stage == 1 or peak.streams <= 3
