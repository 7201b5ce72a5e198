"""Scripts after the ``*_no_trainer`` examples log, in a layout, what they log with Accelerate in one process."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, get_scheduler, set_seed

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale._compat.accelerate import BatchScheduler
from hfscale.testing import RankPool

from ..sweeps import pairs
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
TP2 = {"tp_size": 2}
PP2 = {"pp_size": 2}
DP2 = {"dp_shard_size": 2}
Layout = dict[str, int]


class Rows(Dataset):
    def __init__(self, count: int, seed: int) -> None:
        self.ids = torch.randint(3, 67, (count, 8), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def script(
    path: str,
    layout: Layout | None,
    steps: int | None,
    accumulate: int = 1,
    stop: str = "",
    resume: str = "",
) -> list[tuple[Any, ...]]:
    """Two epochs of six steps; with ``steps`` the schedule is counted in steps of all processes, else in batches.

    Args:
        layout: ``None`` for stock Accelerate and transformers.
        stop: save the state here after four steps, and stop.
        resume: go on from there.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    kind = accelerate.Accelerator if layout is None else hfscale.Accelerator
    accelerator = kind(cpu=True, gradient_accumulation_steps=accumulate)
    set_seed(7)
    if layout is None:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    else:
        model = hfscale.from_pretrained(
            path, parallel=ParallelConfig(**layout), dtype=torch.float64
        )
    rows = 4 // accelerator.num_processes
    loader = DataLoader(Rows(24 * accumulate, 1), shuffle=True, batch_size=rows)
    held_out = DataLoader(Rows(10, 2), batch_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    length = (
        2 * math.ceil(len(loader) / accumulate)
        if steps is None
        else steps * accelerator.num_processes
    )
    scheduler = get_scheduler("linear", optimizer, 2 * accelerator.num_processes, length)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    logged: list[tuple[Any, ...]] = [(accelerator.num_processes * rows * accumulate, len(loader))]
    done = 4 if resume else 0
    if resume:
        accelerator.load_state(resume)
    for epoch in range(2):
        model.train()
        loss_sum = torch.zeros((), dtype=torch.float64)
        batches = loader
        if done and epoch == 0:
            batches = accelerator.skip_first_batches(loader, done * accumulate)
        for batch in batches:
            with accelerator.accumulate(model):
                if layout == PP2:
                    loss = hfscale.train_step(model, batch)
                else:
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                loss_sum += loss.detach()
                norm = (
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    if accelerator.sync_gradients
                    else None
                )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                logged.append((done, scheduler.get_last_lr()[0], float(norm)))
            if stop and done == 4:
                accelerator.save_state(stop)
                return logged
        model.eval()
        losses = []
        for batch in held_out:
            with torch.no_grad():
                loss = hfscale.eval_step(model, batch) if layout == PP2 else model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(1)))
        losses = torch.cat(losses)
        seen = accelerator.reduce(loss_sum, "mean").item() / len(loader)
        logged.append((len(losses), math.exp(losses.mean()), seen))
    return logged


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("start")
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64).save_pretrained(made)
    return str(made)


def assert_equal(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)


LENGTHS = {"epochs": None, "steps": 12}
LAYOUTS = {"tp2": (TP2, 2), "shard2": (DP2, 2), "pp2": (PP2, 1)}


@pytest.mark.daily("pp2-epochs")
@pytest.mark.parametrize(
    ("layout", "steps"),
    pairs(LAYOUTS, LENGTHS, daily=[("tp2", "epochs"), ("shard2", "steps"), ("pp2", "epochs")]),
)
def test_logs_equal_one_process(pools: Pools, path: str, layout: str, steps: str) -> None:
    """Schedules (trap T34), norms, losses of training and perplexity, in the order that one process shuffles."""
    sizes, accumulate = LAYOUTS[layout]
    (_, batches), *expected = script(path, None, LENGTHS[steps], accumulate)
    for (rows, own), *found in pools(2).run(script, path, sizes, LENGTHS[steps], accumulate):
        assert (rows, own) == (4 * accumulate, batches)
        assert_equal(found, expected)


def test_a_run_goes_on_in_another_layout(pools: Pools, path: str, tmp_path: Path) -> None:
    """After as many steps, in the order of the epoch that was cut short, at the rate where the schedule was."""
    _, *expected = script(path, None, 12)
    pools(2).run(script, path, DP2, 12, 1, str(tmp_path / "state"))
    for _, *found in pools(2).run(script, path, TP2, 12, 1, "", str(tmp_path / "state")):
        assert_equal([row[:2] for row in found], [row[:2] for row in expected[4:]])


def counted(path: str) -> tuple[list[Any], list[str]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = hfscale.Accelerator()
    accelerator._told.add(2)  # as where it was read before any model of this process was built
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**TP2))
    found = [accelerator.num_processes, accelerator.process_index]
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        accelerator.prepare(model)
    found += [accelerator.num_processes, accelerator.process_index]
    found += [
        accelerator.is_main_process,
        accelerator.is_local_main_process,
        accelerator.is_last_process,
    ]
    return found, [str(each.message) for each in given]


def test_processes_are_distinct_batches(pools: Pools, path: str) -> None:
    """Before and after ``prepare``; who prints and writes is a process, and what was read too early is warned of."""
    (first, said), (second, unsaid) = pools(2).run(counted, path)
    assert first == [1, 0, 1, 0, True, True, False]
    assert second == [1, 0, 1, 0, False, False, True]
    assert [
        "was 2 when it was read before this model was built, but with tp2 it is 1" in each
        for each in said
    ] == [True]
    assert unsaid == []


def test_a_schedule_that_cannot_change_its_count_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    five = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=5)
    cycle = BatchScheduler.of(AcceleratedScheduler(five, []), lambda: 2)
    optimizer.step()
    for _ in range(3):
        cycle.step()  # the sixth step would be one too many
    four = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    other = BatchScheduler.of(AcceleratedScheduler(four, []), lambda: 1)
    with pytest.raises(
        CheckpointError,
        match="counts steps of 2 distinct batches per optimizer step, but this layout has 1",
    ):
        other.load_state_dict(cycle.state_dict())
