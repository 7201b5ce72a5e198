"""A resumed run is the run that did not stop (traps T16, T25)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.data import local_tensor
from hfscale.testing import RankPool

from ..models import tiny

Pools = Callable[[int], RankPool]
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


def start(layout: dict[str, Any], seed: int) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = hfscale.from_config(tiny("gpt2", **DROPOUT), parallel=ParallelConfig(**layout), seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)


def train(run: tuple[Any, torch.optim.Optimizer, Any], steps: range) -> list[float]:
    model, optimizer, scheduler = run
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + hfscale.batch_rank(model))
        ids = torch.randint(0, 67, (2, 9), generator=generator)
        losses.append(hfscale.train_step(model, {"input_ids": ids, "labels": ids}).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def weights(model: Any) -> dict[str, Tensor]:
    return {name: local_tensor(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def stop_and_go(layout: dict[str, Any], directory: str) -> None:
    run = start(layout, 0)
    train(run, range(2))
    hfscale.save_state(run[0], directory, optimizer=run[1], scheduler=run[2])
    expected, end = train(run, range(2, 4)), weights(run[0])

    resumed = start(layout, 1)  # other weights, other random streams
    train(resumed, range(5, 6))
    hfscale.load_state(resumed[0], directory, optimizer=resumed[1], scheduler=resumed[2])
    assert train(resumed, range(2, 4)) == expected
    for name, weight in weights(resumed[0]).items():
        assert torch.equal(weight, end[name]), name


LAYOUTS = {
    "tp2": {"tp_size": 2},
    "sequence": {"tp_size": 2, "sequence_parallel": True},
    "shard2": {"dp_shard_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "tp2-replicate2": {"tp_size": 2, "dp_replicate_size": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumed_bit_by_bit(pools: Pools, tmp_path: Path, layout: str) -> None:
    parallel = LAYOUTS[layout]
    pools(ParallelConfig(**parallel).total_size).run(stop_and_go, parallel, str(tmp_path / "state"))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def cannot_write(directory: str) -> str:
    model, *_ = start({"tp_size": 2}, 0)
    with pytest.raises(CheckpointError) as caught:
        hfscale.save_state(model, directory)
    return str(caught.value)


def test_all_ranks_learn_that_the_directory_cannot_be_made(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for message in pools(2).run(cannot_write, str(tmp_path / "file" / "state")):
        assert "could not be written: rank 0: " in message


def test_one_process(tmp_path: Path) -> None:
    stop_and_go({}, str(tmp_path / "state"))


def test_refusals(tmp_path: Path) -> None:
    model, optimizer, scheduler = start({}, 0)
    with pytest.raises(CheckpointError, match="not a state"):
        hfscale.load_state(model, tmp_path)
    hfscale.save_state(model, tmp_path / "state", optimizer=optimizer)
    with pytest.raises(CheckpointError, match="no 'scheduler'"):
        hfscale.load_state(model, tmp_path / "state", scheduler=scheduler)
    some = torch.optim.AdamW(list(model.parameters())[:2])
    with pytest.raises(CheckpointError, match="other parameters or groups"):
        hfscale.load_state(model, tmp_path / "state", optimizer=some)
    other = hfscale.from_config(tiny("gpt2", n_embd=16))
    with pytest.raises(CheckpointError, match="of another model"):
        hfscale.load_state(other, tmp_path / "state")
    (tmp_path / "state" / "layout.json").write_text('{"tp": 2}')
    with pytest.raises(CheckpointError, match="in the same layout"):
        hfscale.load_state(model, tmp_path / "state")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        hfscale.save_state(model, tmp_path / "file" / "state")
