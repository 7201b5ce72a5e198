"""What an Accelerator asks of all processes, the rows of streams that it counts, and schedules of every kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, IterableDataset

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(torch.arange(self.length))


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


def prepared(layout: dict[str, Any], **asked: Any) -> tuple[Any, Any]:
    # A process has one precision, and this one is used again.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = hfscale.Accelerator(cpu=True, **asked)
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout))
    return accelerator, accelerator.prepare(model)


def counted(layout: dict[str, Any]) -> dict[Any, list[int]]:
    """The rows of streams that are gathered for metrics, as tensors and as other objects, in a second epoch too."""
    accelerator, _ = prepared(layout)
    found = {}
    for length in (30, 29, 16, 3):
        for kind in (Stream, Sized):
            loader = accelerator.prepare(DataLoader(kind(length), batch_size=4))
            for epoch in range(2):
                rows: list[int] = []
                names: list[int] = []
                for batch in loader:
                    rows += accelerator.gather_for_metrics(batch).tolist()
                    names += map(
                        int, accelerator.gather_for_metrics([str(each) for each in batch.tolist()])
                    )
                assert names == rows
                found[length, kind.__name__, epoch] = rows
    in_parts, _ = prepared(layout, split_batches=True)
    loader = in_parts.prepare(DataLoader(Stream(13), batch_size=4, num_workers=1))
    found[13, "split", 0] = [
        row for batch in loader for row in in_parts.gather_for_metrics(batch).tolist()
    ]
    return found


@pytest.mark.parametrize(
    "layout", [{"dp_shard_size": 2}, {"tp_size": 2}, {"tp_size": 2, "dp_replicate_size": 2}]
)
@pytest.mark.daily("layout0", "layout2")
def test_rows_of_a_stream_count_once(pools: Pools, layout: dict[str, Any]) -> None:
    for found in pools(ParallelConfig(**layout).total_size).run(counted, layout):
        for (length, *_), rows in found.items():
            assert rows == list(range(length))


def triggered(layout: dict[str, Any], by: int) -> list[bool]:
    accelerator, _ = prepared(layout)
    if torch.distributed.get_rank() == by:
        accelerator.set_trigger()
    return [accelerator.check_trigger(), accelerator.check_trigger()]


@pytest.mark.parametrize(
    "layout", [{"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}, {"cp_size": 2}]
)
@pytest.mark.daily("layout0", "layout1")
def test_a_trigger_is_seen_by_all_processes(pools: Pools, layout: dict[str, Any]) -> None:
    for by in (0, 1):
        assert pools(2).run(triggered, layout, by) == [[True, False]] * 2


METRIC = [3.0, 2.5, 2.5, 2.6, 2.0, 1.9, 2.2]


MAKE: dict[str, Callable[[Any, int], Any]] = {  # ``steps``: how many are made in an optimizer step
    "sequential": lambda o, steps: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.1, 2 * steps), schedules.StepLR(o, steps, 0.9)], [2 * steps]
    ),
    "chained": lambda o, steps: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.1, 2 * steps), schedules.StepLR(o, steps, 0.9)], optimizer=o
    ),
    "plateau": lambda o, steps: schedules.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


def rates(layout: dict[str, Any], name: str, directory: str) -> list[float]:
    """The rate of every step, from a saved state on too."""
    told = []
    for steps in (range(3), range(3, len(METRIC))):
        accelerator, model = prepared(layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        made = MAKE[name](optimizer, accelerator.num_processes)
        optimizer, schedule = accelerator.prepare(optimizer, made)
        if steps[0]:
            accelerator.load_state(directory)
        for step in steps:
            optimizer.step()
            schedule.step(METRIC[step]) if name == "plateau" else schedule.step()
            told.append(optimizer.param_groups[0]["lr"])
        accelerator.save_state(directory)
    return told


@pytest.mark.parametrize("name", MAKE)
def test_schedules_of_schedules_and_of_metrics(pools: Pools, name: str, tmp_path: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-2)
    stock = MAKE[name](optimizer, 1)
    expected = []
    for metric in METRIC:
        optimizer.step()
        stock.step(metric) if name == "plateau" else stock.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert len({*expected}) > 1
    for found in pools(2).run(rates, {"dp_shard_size": 2}, name, str(tmp_path)):
        assert found == pytest.approx(expected)
