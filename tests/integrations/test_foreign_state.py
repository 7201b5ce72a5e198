"""Runs that go on from what Accelerate's ``save_state`` wrote, with the losses of its own continuation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.testing import RankPool

from ..arrivals import write_optimizer, write_partitions, write_shards
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS = [{"tp_size": 2}, {"dp_shard_size": 2}, {"pp_size": 2}]
# Otherwise Accelerate steps a schedule once for each process.
ONCE = DataLoaderConfiguration(split_batches=True)
CONFIGS = {
    "llama": tiny("llama"),
    "tied": tiny("llama", tie_word_embeddings=True),
    "dropping": tiny("gpt2", resid_pdrop=0.2, embd_pdrop=0.2),
}


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 67, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def trained(model: Any, groups: int) -> tuple[Any, Any]:
    parameters = list(model.parameters())
    given: Any = parameters
    if groups == 2:
        given = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
    optimizer = torch.optim.AdamW(given, lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def theirs(start: str, out: str, groups: int) -> tuple[list[float], list[list[str]]]:
    """Three steps of stock code, its state, the losses of the next three, and the order of its parameters."""
    for each in (AcceleratorState, PartialState, GradientState):
        each._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=ONCE)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).train()
    named = {id(p): name for name, p in model.named_parameters()}
    optimizer, schedule = trained(model, groups)
    names = [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    losses = []
    torch.manual_seed(7 + accelerator.process_index)
    for step in range(6):
        rows = {
            name: value.chunk(accelerator.num_processes)[accelerator.process_index]
            for name, value in batch(step).items()
        }
        loss = model(**rows, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 2:
            accelerator.save_state(out)
            accelerator.unwrap_model(model).save_pretrained(f"{out}-weights")
    for each in (AcceleratorState, PartialState, GradientState):
        each._reset_state()
    return losses[3:], names


def ours(start: str, out: str, layout: dict[str, int], groups: int) -> list[float]:
    for each in (AcceleratorState, PartialState, GradientState):
        each._reset_state()
    model = hfscale.from_pretrained(
        start, parallel=ParallelConfig(**layout), dtype=torch.float32
    ).train()
    accelerator = hfscale.Accelerator(cpu=True, dataloader_config=ONCE)
    optimizer, schedule = trained(model, groups)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.load_state(out)
    rank, world = hfscale.batch_rank(model), hfscale.batch_world(model)
    losses = []
    for step in range(3, 6):
        rows = {name: value.chunk(world)[rank] for name, value in batch(step).items()}
        losses.append(float(hfscale.train_step(model, rows)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for each in (AcceleratorState, PartialState, GradientState):
        each._reset_state()
    return losses


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        found[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(found[name])
    return found


@pytest.mark.parametrize(
    ("name", "groups", "sharded"), [("llama", 2, False), ("tied", 1, False), ("llama", 1, True)]
)
def test_losses_are_those_of_the_other_trainers_continuation(
    name: str, groups: int, sharded: bool, starts: dict[str, str], pools: Pools, tmp_path: Path
) -> None:
    out = str(tmp_path / "state")
    expected, names = theirs(starts[name], out, groups)
    if sharded:
        pools(2).run(write_shards, f"{out}-weights", out, "accelerate")
        pools(2).run(write_optimizer, f"{out}-weights", f"{out}/optimizer.bin", out, names)
        for file in ("model.safetensors", "optimizer.bin"):
            Path(out, file).unlink()
    for layout in LAYOUTS:
        for losses in pools(2).run(ours, starts[name], out, layout, groups):
            assert losses == pytest.approx(expected, rel=1e-5), layout


@pytest.mark.parametrize("processes", [1, 2])
def test_masks_go_on_where_ranks_have_the_batches_of_its_processes(
    processes: int, starts: dict[str, str], pools: Pools, tmp_path: Path
) -> None:
    out = str(tmp_path / "state")
    pool = pools(2)
    run = pool.run if processes == 2 else lambda *given: [pool.alone(*given)]
    told = [losses for losses, _ in run(theirs, starts["dropping"], out, 1)]
    expected = [sum(each) / processes for each in zip(*told, strict=True)]
    layout = {"dp_shard_size": 2} if processes == 2 else {"tp_size": 2}
    for losses in pool.run(ours, starts["dropping"], out, layout, 1):
        assert losses == pytest.approx(expected, rel=1e-5)


def from_directory(directory: str, base: str, layout: dict[str, int], groups: int) -> list[float]:
    """Three further steps of a plain loop."""
    model = hfscale.from_pretrained(
        directory, parallel=ParallelConfig(**layout), dtype=torch.float32, config=base
    ).train()
    optimizer, schedule = trained(model, groups)
    done = hfscale.load_optimizer(model, optimizer, directory)
    assert done == 3
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.9**done
    schedule.last_epoch = done
    rank, world = hfscale.batch_rank(model), hfscale.batch_world(model)
    losses = []
    for step in range(done, 6):
        rows = {name: value.chunk(world)[rank] for name, value in batch(step).items()}
        losses.append(float(hfscale.train_step(model, rows)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_of_zero_go_on_in_plain_loops(
    stage: int, starts: dict[str, str], pools: Pools, tmp_path: Path
) -> None:
    state, out = str(tmp_path / "state"), str(tmp_path / "zero")
    expected, names = theirs(starts["llama"], state, 2)
    write_partitions(f"{state}-weights", f"{state}/optimizer.bin", out, names, stage)
    for layout in LAYOUTS:
        for losses in pools(2).run(from_directory, out, starts["llama"], layout, 2):
            assert losses == pytest.approx(expected, rel=1e-5), layout
    Path(out, "global_step3", "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="files of 3 ranks"):
        hfscale.from_pretrained(out, config=starts["llama"])


def test_other_parameters_are_refused(starts: dict[str, str], tmp_path: Path) -> None:
    out = str(tmp_path / "state")
    theirs(starts["llama"], out, 2)
    with pytest.raises(CheckpointError, match="in 2 groups"):
        ours(starts["llama"], out, {}, 1)
    Path(out, "optimizer.bin").unlink()
    with pytest.raises(CheckpointError, match="must have an optimizer's state"):
        ours(starts["llama"], out, {}, 2)
