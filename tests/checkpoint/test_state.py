"""A resumed run is the run that did not stop (traps T16, T25)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime.shards import local_tensor

from ..sweeps import cases
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


def start(layout: dict[str, Any], seed: int) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    # Its stages hold weights of different steps.
    tied = layout.get("pipeline_schedule") != "pipedream"
    config = tiny("gpt2", n_layer=4, tie_word_embeddings=tied, **DROPOUT)
    model = hfscale.from_config(config, parallel=ParallelConfig(**layout), seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)


def train(run: tuple[Any, torch.optim.Optimizer, Any], steps: range) -> list[float]:
    model = run[0]
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + hfscale.batch_rank(model))
        ids = torch.randint(0, 67, (4, 9), generator=generator)
        losses.append(hfscale.train_step(model, {"input_ids": ids, "labels": ids}).item())
        update(run)
    for loss in hfscale.drain(model):  # of schedules without a flush
        losses.append(loss.item())
        update(run)
    return [loss for loss in losses if loss == loss]  # such a schedule has none at first


def update(run: tuple[Any, torch.optim.Optimizer, Any]) -> None:
    _, optimizer, scheduler = run
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def weights(model: Any) -> dict[str, Tensor]:
    # A tied tensor under the name that the stage has for it.
    here = model.named_parameters(remove_duplicate=False)
    return {name: local_tensor(parameter.detach()).clone() for name, parameter in here}


def stop_and_go(layout: dict[str, Any], directory: str) -> None:
    run = start(layout, 0)
    train(run, range(2))
    hfscale.save_state(run[0], directory, optimizer=run[1], scheduler=run[2])
    expected = train(run, range(2, 4))
    end = weights(run[0])

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
    "cp2-shard2": {"cp_size": 2, "dp_shard_size": 2},
    "pp2": {"pp_size": 2, "stage_layers": (1, 3)},
    "interleaved": {"pp_size": 2, "pipeline_schedule": "interleaved1f1b"},
    "zbv": {"pp_size": 2, "pipeline_schedule": "zbv"},
    "pipedream": {"pp_size": 2, "pipeline_schedule": "pipedream"},
    "pipedream_2bw": {"pp_size": 2, "pipeline_schedule": "pipedream_2bw"},
    "pp2-tp2": {"pp_size": 2, "tp_size": 2},
    "pp2-tp2-sequence": {"pp_size": 2, "tp_size": 2, "sequence_parallel": True},
    "pp2-shard2": {"pp_size": 2, "dp_shard_size": 2},
    "pp2-replicate2": {"pp_size": 2, "dp_replicate_size": 2},
}


DAILY = ("sequence", "cp2-shard2", "zbv", "pipedream_2bw", "pp2-shard2")


@pytest.mark.daily("zbv")
@pytest.mark.parametrize("layout", cases(LAYOUTS, daily=DAILY))
def test_resumed_bit_by_bit(pools: Pools, tmp_path: Path, layout: str) -> None:
    parallel = LAYOUTS[layout]
    pools(ParallelConfig(**parallel).total_size).run(stop_and_go, parallel, str(tmp_path / "state"))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def written(layout: dict[str, Any], directory: str) -> None:
    model, optimizer, _ = start(layout, 0)
    hfscale.save_state(model, directory, optimizer=optimizer)


def refused_under_way(directory: str) -> list[str]:
    model, optimizer, _ = start({"pp_size": 2, "pipeline_schedule": "pipedream_2bw"}, 0)
    ids = torch.arange(36).view(4, 9)
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    messages = []
    for call in (hfscale.save_state, hfscale.load_state):
        with pytest.raises(CheckpointError) as caught:
            call(model, directory)
        messages.append(str(caught.value))
    for _ in hfscale.drain(model):
        optimizer.step()
    hfscale.save_state(model, directory)
    return messages


def test_microbatches_under_way_are_not_lost_silently(pools: Pools, tmp_path: Path) -> None:
    for messages in pools(2).run(refused_under_way, str(tmp_path / "state")):
        for message, call in zip(messages, ("save_state", "load_state"), strict=True):
            assert (
                f"{call} would lose the gradients of the microbatches that pipedream_2bw has in flight"
                in message
            )
            assert "hfscale.drain(model)" in message


def resumed(layout: dict[str, Any], directory: str) -> dict[str, Tensor]:
    model, optimizer, _ = start(layout, 1)
    hfscale.load_state(model, directory, optimizer=optimizer)
    return weights(model)


def test_another_order_of_the_same_stages_resumes(pools: Pools, tmp_path: Path) -> None:
    """What is on which rank counts, and not when it is computed."""
    pool = pools(2)
    directory = str(tmp_path / "state")
    pool.run(written, {"pp_size": 2, "pipeline_schedule": "interleaved1f1b"}, directory)
    found = pool.run(
        resumed, {"pp_size": 2, "pipeline_schedule": "looped_bfs", "num_microbatches": 4}, directory
    )
    expected = weights(start({}, 0)[0])
    assert {name for rank in found for name in rank} == expected.keys() | {"lm_head.weight"}
    for rank in found:
        for name, weight in rank.items():
            assert torch.equal(
                weight, expected["transformer.wte.weight" if name == "lm_head.weight" else name]
            ), name


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


class Odd:
    """A state that only code could make again."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_refusals(tmp_path: Path) -> None:
    model, optimizer, scheduler = start({}, 0)
    with pytest.raises(CheckpointError, match="not a state"):
        hfscale.load_state(model, tmp_path)
    hfscale.save_state(model, tmp_path / "weights")
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        hfscale.load_state(model, tmp_path / "weights", optimizer=optimizer)
    hfscale.save_state(model, tmp_path / "state", optimizer=optimizer)
    with pytest.raises(CheckpointError, match="no 'scheduler'"):
        hfscale.load_state(model, tmp_path / "state", scheduler=scheduler)
    some = torch.optim.AdamW(list(model.parameters())[:2])
    with pytest.raises(CheckpointError, match="other parameters or groups"):
        hfscale.load_state(model, tmp_path / "state", optimizer=some)
    other = hfscale.from_config(tiny("gpt2", n_embd=16))
    with pytest.raises(CheckpointError, match="that this model lacks"):
        hfscale.load_state(other, tmp_path / "state")
    with pytest.raises(
        CheckpointError, match=r"in torch.float32, but this model has it in torch.bfloat16"
    ):
        hfscale.load_state(start({}, 0)[0].to(torch.bfloat16), tmp_path / "state")
    with pytest.raises(CheckpointError, match="dataloader=list has no state_dict"):
        hfscale.save_state(model, tmp_path / "state", dataloader=[])
    with pytest.raises(CheckpointError, match="the state of 'odd' is not plain data"):
        hfscale.save_state(model, tmp_path / "state", odd=Odd())
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "layout.json").write_text('{"tp": 2}')
    with pytest.raises(CheckpointError, match="the save was interrupted"):
        hfscale.load_state(model, tmp_path / "old")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        hfscale.save_state(model, tmp_path / "file" / "state")
