"""A run that goes on from its hosts' memory is the run that did not stop; hosts are directories here."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hfscale
from hfscale import CheckpointError, ParallelConfig, StatesInMemory
from hfscale.checkpoint import state_directory
from hfscale.extras.states_in_memory import hosts, in_memory
from hfscale.testing import RankPool

from ..checkpoint.test_state import train, weights
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
SHARD2 = {"dp_shard_size": 2}
ONE = {"dp_shard_size": 1}


def start(
    layout: dict[str, Any], seed: int, root: str, per_host: int = 1
) -> tuple[Any, StatesInMemory]:
    """A run and its states in memory; ``per_host`` ranks see one directory."""
    config = tiny("llama", num_hidden_layers=2, vocab_size=67)
    model = hfscale.from_config(
        config, parallel=ParallelConfig(**layout), seed=seed, dtype=torch.float64
    ).train()
    optimizer = hfscale.create_optimizer(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
    rank = dist.get_rank() if dist.is_initialized() else 0
    memory = Path(root) / f"host-{rank // per_host}"
    memory.mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {"optimizer": optimizer, "memory": memory, "scheduler": scheduler}
    return (model, optimizer, scheduler), StatesInMemory(model, f"{root}/states", every=2, **given)


def names(memory: StatesInMemory) -> list[str]:
    (state,) = memory.directory.glob("step-*")
    return sorted(path.name for path in state.glob("rank-*.pt"))


def stop_and_go(layout: dict[str, Any], root: str, per_host: int, lost: int) -> None:
    """Stop behind step 2; the host of rank ``lost`` comes back without its memory."""
    run, memory = start(layout, 0, root, per_host)
    assert memory.load().step == 0
    train(run, range(2))
    assert memory.save(2)
    assert not memory.save(3)
    # the state is written meanwhile
    expected = train(run, range(2, 4))
    end = weights(run[0])
    hfscale.wait_for_saves()
    world = dist.get_world_size()
    assert len(names(memory)) == min(world, 2 * per_host)  # its own, and those of the host before
    assert memory.bytes > 0
    assert memory.seconds > 0
    dist.barrier()
    if dist.get_rank() // per_host == lost // per_host:
        shutil.rmtree(memory.directory, ignore_errors=True)
    dist.barrier()
    resumed, again = start(layout, 1, root, per_host)
    assert again.load().step == 2
    assert len(names(again)) == world
    assert train(resumed, range(2, 4)) == expected
    assert all(torch.equal(weight, end[name]) for name, weight in weights(resumed[0]).items())
    again.remove()
    assert not again.directory.exists()


def test_a_lost_host(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(stop_and_go, SHARD2, str(tmp_path), 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize(
    "layout", [{"pp_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "dp_shard_size": 2}]
)
def test_a_lost_host_of_several(
    pools: Pools, tmp_path: Path, layout: dict[str, Any], per_host: int, lost: int
) -> None:
    pools(4).run(stop_and_go, layout, str(tmp_path), per_host, lost)


def batches(step: int, model: Any) -> torch.Tensor:
    ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(step))
    return ids[hfscale.batch_rank(model) :: hfscale.batch_world(model)]


def leg(layout: dict[str, Any], root: str, steps: range) -> list[float]:
    run, memory = start(layout, steps.start, root)
    assert memory.load().step == steps.start
    losses = []
    for step in steps:
        ids = batches(step, run[0])
        losses.append(float(hfscale.train_step(run[0], {"input_ids": ids, "labels": ids})))
        run[1].step()
        run[2].step()
        run[1].zero_grad()
        memory.save(step + 1)
    hfscale.wait_for_saves()
    return losses


def test_fewer_ranks(pools: Pools, tmp_path: Path) -> None:
    """The second host is gone: the first goes on alone from what it keeps of both; then both, from what it has."""
    expected = pools(1).run(leg, ONE, str(tmp_path / "undisturbed"), range(6))[0]
    (losses, _) = pools(2).run(leg, SHARD2, str(tmp_path / "run"), range(3))
    shutil.rmtree(tmp_path / "run" / "host-1")
    losses = losses[:2] + pools(1).run(leg, ONE, str(tmp_path / "run"), range(2, 5))[0]
    losses = losses[:4] + pools(2).run(leg, {"tp_size": 2}, str(tmp_path / "run"), range(4, 6))[0]
    assert losses == pytest.approx(expected, rel=1e-12, abs=0)


def torn(root: str, copies: bool) -> int | None:
    """Rank 1 dies before its host has committed step 4; without ``copies`` the first host has not all of it."""
    run, memory = start(SHARD2, 0, root)
    memory.load()
    commit = state_directory.NewState.commit
    before = hosts.Hosts.before

    def dies(new: Any, *_: Any) -> None:
        raise OSError("no space left on device")

    try:
        if not copies:
            hosts.Hosts.before = lambda *_: []
        for step in (2, 4):
            train(run, range(step - 2, step))
            hfscale.wait_for_saves()
            if step == 4 and dist.get_rank() == 1:
                state_directory.NewState.commit = dies
            memory.save(step)
            if step == 4:
                with pytest.raises(CheckpointError, match="no space left"):
                    hfscale.wait_for_saves()
    finally:
        state_directory.NewState.commit, hosts.Hosts.before = commit, before
    return start(SHARD2, 1, root)[1].load().step


@pytest.mark.daily("True")
@pytest.mark.parametrize("copies", [True, False])
def test_a_torn_state(pools: Pools, tmp_path: Path, copies: bool) -> None:
    assert pools(2).run(torn, str(tmp_path), copies) == [4 if copies else 2] * 2


def damage(state: Path) -> None:
    damaged = bytearray((state / "rank-00000.safetensors").read_bytes())
    damaged[-1] ^= 1
    (state / "rank-00000.safetensors").write_bytes(damaged)


def steps_in(memory: StatesInMemory) -> list[str]:
    hfscale.wait_for_saves()
    return [path.name.split("-")[1] for path in memory.directory.iterdir()]


def test_memory_and_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = str(tmp_path)
    run, memory = start(ONE, 0, root)
    train(run, range(2))
    memory.save(2)
    assert start(ONE, 1, root)[1].load().step == 2
    hfscale.save_state(run[0], f"{root}/states/step-3", optimizer=run[1], scheduler=run[2], step=3)
    run, memory = start(ONE, 1, root)
    assert memory.load().step == 3
    assert steps_in(memory) == ["2"]  # until there is another one
    damage(tmp_path / "states" / "step-3")
    assert start(ONE, 1, root)[1].load().step == 2
    assert "step-3 cannot be used: rank-00000.safetensors was changed" in caplog.text
    hfscale.save_state(run[0], f"{root}/states/step-3", optimizer=run[1], scheduler=run[2], step=3)
    memory.save(4)
    assert steps_in(memory) == ["4"]
    damage(next(memory.directory.iterdir()))
    assert start(ONE, 1, root)[1].load().step == 3


def test_a_state_of_another_model_is_kept(tmp_path: Path) -> None:
    """The disk has none to take instead, and a run that began anew would replace the one in memory."""
    (_, _, scheduler), memory = start(ONE, 0, str(tmp_path))
    memory.save(2)
    named = tmp_path / "states" / "_hfscale_run"
    written = named.stat().st_ino
    left = memory.directory / ".step-4-of-1-x.incomplete"
    hfscale.wait_for_saves()
    left.mkdir()
    other = hfscale.from_config(
        tiny("llama", num_hidden_layers=1, vocab_size=67), parallel=ParallelConfig()
    )
    given: dict[str, Any] = {
        "optimizer": hfscale.create_optimizer(other, lr=1e-2),
        "scheduler": scheduler,
    }
    again = StatesInMemory(other, tmp_path / "states", every=2, memory=tmp_path / "host-0", **given)
    assert not left.exists()
    assert named.stat().st_ino == written
    with pytest.raises(CheckpointError, match="step-2"):
        again.load()
    assert steps_in(again) == ["2"]


def test_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(tmp_path)
    memory = start(ONE, 0, root)[1]
    memory.save(6)
    assert steps_in(memory) == ["6"]
    memory = start(ONE, 1, root)[1]
    assert steps_in(memory) == ["6"]
    memory.save(2)  # of a run that begins anew
    assert steps_in(memory) == ["2"]
    assert "belongs to another run" in caplog.text
    shutil.rmtree(tmp_path / "states")
    memory, before = start(ONE, 1, root)[1], memory
    assert "belongs to a run whose directory has been removed" in caplog.text
    assert memory.load().step == 0
    assert not before.directory.exists()
    usage = namedtuple("usage", "free")(1000)
    monkeypatch.setattr(in_memory.shutil, "disk_usage", lambda _: usage)
    memory = start(ONE, 1, str(tmp_path / "full"))[1]
    with pytest.raises(
        CheckpointError, match=r"states in memory need [\d,]+ bytes of this host.*free some memory"
    ):
        memory.save(2)
