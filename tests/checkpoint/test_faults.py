"""Whatever fails on one rank of a save or a load, every rank raises it, and nothing has changed."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.runtime.shards import local_tensor

from ..sweeps import cases
from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
ERRORS = (
    MemoryError(),
    ValueError("of a value"),
    KeyError("of a key"),
    RuntimeError("of a run"),
    OSError(5, "of a disk"),
)
TOLD = (
    "MemoryError",
    "ValueError: of a value",
    "KeyError: 'of a key'",
    "RuntimeError: of a run",
    "[Errno 5] of a disk",
)
LAYOUTS = {"tp2": {"tp_size": 2}, "shard2": {"dp_shard_size": 2}}

# Where it fails, and on which ranks: the first one alone does what concerns all.
WRITING = {
    "checkpoint.state.take_state": (0, 1),
    "checkpoint.state_save.contents_of": (0, 1),
    "checkpoint.state_save._plain_bytes": (0, 1),
    "checkpoint.state_save.agreed_index": (0, 1),
    "checkpoint.state_save._merge": (0, 1),
    "checkpoint.state_save._add_stored_names": (0, 1),
    "checkpoint.state_save.write_tensors": (0, 1),
    "checkpoint.state_save.write_synced": (0, 1),
    "checkpoint.state_save.NewState": (0,),
    "distributed.files.directories.sync": (0,),
    "distributed.files.complete.mark_complete": (0,),
    "checkpoint.state_save.prune": (0,),
}
BEHIND = {"checkpoint.state.on_host": (0, 1), **WRITING}
EXPORTING = {
    "train.guards.replicas._checksums": (0, 1),
    "checkpoint.save.tensors_to_save": (0, 1),
    "checkpoint.save.AsStored": (0, 1),
    "train.runtime.full_tensors._Gathering._copied": (0, 1),
    "train.runtime.full_tensors.write_share": (0,),
    "train.runtime.writing.NewFiles": (0,),
    "checkpoint.save.CheckpointWriter.add": (0,),
    "checkpoint.save.CheckpointWriter.finish": (0,),
    "checkpoint.save.write_configs": (0,),
    "distributed.files.directories.sync": (0,),
}
ADAPTERS = {
    "features.adapters.storage.stored_names": (0,),
    "train.runtime.full_tensors._Gathering._copied": (0, 1),
    "train.runtime.full_tensors.write_share": (0,),
    "features.adapters.storage.save_file": (0,),
    "features.adapters.storage.write_adapter_config": (0,),
}
READING = {
    "checkpoint.state_directory.candidates": (0,),
    "distributed.files.complete.content_problems": (0, 1),
    "checkpoint.state_load.StateIndex.read": (0, 1),
    "checkpoint.state_load._Found._rest": (0, 1),
    "checkpoint.state_format.StateReader.read": (0, 1),
    "checkpoint.state_load.restore_random_states": (0, 1),
    "distributed.files.reader.os.preadv": (0, 1),
}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    "Adam": lambda model: torch.optim.Adam(model.parameters()),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
    "own": lambda model: hfscale.create_optimizer(model, "adafactor", lr=1e-2),
}


class Run:
    """A model, its optimizer and scheduler, after a step."""

    def __init__(
        self, layout: dict[str, Any], adapters: bool = False, optimizer: str = "AdamW"
    ) -> None:
        self.model = hfscale.from_config(
            tiny("llama", num_hidden_layers=1), parallel=ParallelConfig(**layout)
        )
        if adapters:
            peft = hfscale.get_peft_model(
                self.model, LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
            )
            self.model = peft.base_model.model
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=8)
        self.others = {"optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self) -> None:
        ids = torch.arange(18).view(2, 9)
        hfscale.train_step(self.model, {"input_ids": ids, "labels": ids})
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def everything(self) -> list[Any]:
        """All that a load may change, as plain data."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for values in self.optimizer.state.values():
            tensors += [value for value in values.values() if isinstance(value, Tensor)]
        plain: list[Any] = [local_tensor(tensor.detach()).tolist() for tensor in tensors]
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        numbers = np.random.get_state()
        streams = [
            torch.get_rng_state().tolist(),
            random.getstate(),
            numbers[1].tolist(),
            numbers[2],
        ]
        return [*plain, groups, self.scheduler.state_dict(), streams]


def said(call: Callable[[], Any], place: str, rank: int, error: Exception) -> str:
    """What ``call`` raises while ``place`` does on one rank."""
    fault = patch(f"hfscale.{place}", side_effect=error)
    if dist.get_rank() == rank:
        fault.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            call()
        return str(caught.value)
    finally:
        if dist.get_rank() == rank:
            fault.stop()


def check(call: Callable[[], Any], places: dict[str, tuple[int, ...]]) -> None:
    """Let each place fail on each of its ranks, with one type of error after the other."""
    for number, (place, rank) in enumerate(
        (place, rank) for place, ranks in places.items() for rank in ranks
    ):
        message = said(call, place, rank, ERRORS[number % len(ERRORS)])
        assert f"rank {rank}: " in message, (place, message)
        assert TOLD[number % len(ERRORS)] in message, (place, message)


def saves(layout: dict[str, Any], directory: str) -> None:
    run = Run(layout)
    state = f"{directory}/state"
    run.step()
    hfscale.save_state(run.model, state, **run.others, step=1)
    check(lambda: hfscale.save_state(run.model, state, **run.others, keep_last=2, step=2), WRITING)

    def behind() -> None:
        hfscale.save_state(run.model, state, **run.others, keep_last=2, asynchronous=True)
        hfscale.wait_for_saves()

    check(behind, BEHIND)
    for error, told in zip(ERRORS, TOLD, strict=True):
        assert f"rank 1: {told}" in said(behind, "checkpoint.state_save.write_tensors", 1, error)
    hfscale.load_state(run.model, directory, **run.others)


@pytest.mark.parametrize("layout", cases(LAYOUTS, daily=["shard2"]))
def test_states_are_written_on_all_ranks_or_none(pools: Pools, tmp_path: Path, layout: str) -> None:
    pools(2).run(saves, LAYOUTS[layout], str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def exports(directory: str) -> None:
    run = Run({"tp_size": 2})
    hfscale.save_pretrained(run.model, f"{directory}/model")
    check(lambda: hfscale.save_pretrained(run.model, f"{directory}/model"), EXPORTING)
    with_adapters = Run({"tp_size": 2}, adapters=True)
    hfscale.save_pretrained(with_adapters.model, f"{directory}/adapter")
    check(lambda: hfscale.save_pretrained(with_adapters.model, f"{directory}/adapter"), ADAPTERS)


def test_checkpoints_are_written_on_all_ranks_or_none(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(exports, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def next_save(directory: str) -> str:
    run = Run({"tp_size": 2})
    save = said(
        lambda: [hfscale.save_state(run.model, directory, asynchronous=True) for _ in range(2)],
        "checkpoint.state_save.write_tensors",
        1,
        MemoryError(),
    )
    fault = patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread"))
    with fault if dist.get_rank() == 1 else nullcontext():  # it saves at once
        hfscale.save_state(run.model, directory, asynchronous=True)
        hfscale.wait_for_saves()
    return save


def test_the_next_save_tells_of_a_failed_one(pools: Pools, tmp_path: Path) -> None:
    for message in pools(2).run(next_save, str(tmp_path / "state")):
        assert "asynchronous save of" in message
        assert "rank 1: MemoryError" in message


def loads(layout: dict[str, Any], directory: str) -> None:
    run = Run(layout)
    run.step()
    hfscale.save_state(run.model, directory, **run.others)
    run.step()
    before = run.everything()

    def load() -> None:
        hfscale.load_state(run.model, directory, **run.others)

    check(load, READING)
    assert run.everything() == before
    load_state_dict = run.scheduler.load_state_dict
    for rank in range(2):

        def half(state: dict[str, Any], rank: int = rank) -> None:
            load_state_dict(state)
            if dist.get_rank() == rank:
                raise KeyError("half")

        run.scheduler.load_state_dict = half  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=f"rank {rank}: .*KeyError: 'half'"):
            load()
        del run.scheduler.load_state_dict
        assert run.everything() == before
    load()
    assert run.everything() != before


@pytest.mark.parametrize("layout", cases(LAYOUTS, daily=["tp2"]))
def test_states_are_loaded_on_all_ranks_or_none(pools: Pools, tmp_path: Path, layout: str) -> None:
    pools(2).run(loads, LAYOUTS[layout], str(tmp_path / "state"))


def loads_checkpoint(directory: str) -> None:
    def load() -> None:
        hfscale.from_pretrained(directory, parallel=ParallelConfig(tp_size=2))

    check(
        load, {"checkpoint.load.open_tensors": (0, 1), "distributed.files.reader.os.preadv": (0, 1)}
    )
    load()


def test_checkpoints_are_loaded_on_all_ranks_or_none(pools: Pools, tmp_path: Path) -> None:
    hfscale.save_pretrained(Run({}).model, tmp_path)
    pools(2).run(loads_checkpoint, str(tmp_path))


@pytest.mark.parametrize(
    ("then", "now", "fits"),
    [
        ("AdamW", "SGD", False),
        ("SGD", "AdamW", False),
        ("own", "AdamW", False),
        ("AdamW", "Adam", True),
    ],
)
def test_another_optimizer_is_refused(tmp_path: Path, then: str, now: str, fits: bool) -> None:
    run = Run({}, optimizer=then)
    run.step()
    hfscale.save_state(run.model, tmp_path / "state", optimizer=run.optimizer)
    other = OPTIMIZERS[now](run.model)
    if fits:
        hfscale.load_state(run.model, tmp_path / "state", optimizer=other)
        return
    before = run.everything()
    with pytest.raises(
        CheckpointError,
        match=r"has the state of the optimizer (AdamW|SGD|adafactor) .* cannot load",
    ):
        hfscale.load_state(run.model, tmp_path / "state", optimizer=other)
    assert run.everything() == before
    assert not other.state


def with_nan(directory: str) -> list[str]:
    run = Run({"tp_size": 2})
    logged: list[str] = []
    with patch(
        "hfscale.train.runtime.writing._log.warning",
        lambda message, *given: logged.append(message % given),
    ):
        hfscale.save_pretrained(run.model, f"{directory}/whole")
        hfscale.save_state(run.model, f"{directory}/state", **run.others)
        assert not logged
        with torch.no_grad():
            weight = run.model.get_parameter("model.layers.0.mlp.down_proj.weight")
            weight[0, 0] = float("nan") if dist.get_rank() == 1 else 0.0
        hfscale.save_pretrained(run.model, f"{directory}/model")
        hfscale.save_state(run.model, f"{directory}/state", **run.others)
        hfscale.load_state(run.model, f"{directory}/state", **run.others)
        hfscale.from_pretrained(f"{directory}/model", parallel=ParallelConfig(tp_size=2))
    return logged


def test_nan_is_told(pools: Pools, tmp_path: Path) -> None:
    """Once for each save and load, on the first rank, and it is no refusal."""
    first, second = pools(2).run(with_nan, str(tmp_path))
    assert second == []
    assert len(first) == 4
    for message in first:
        assert "has NaN or infinity in " in message
        assert "model.layers.0.mlp.down_proj.weight" in message


def test_an_interrupt_stays_one(tmp_path: Path) -> None:
    run = Run({})
    hfscale.save_state(run.model, tmp_path / "state")
    fault = patch("hfscale.checkpoint.state_save.write_tensors", side_effect=KeyboardInterrupt)
    with fault, pytest.raises(KeyboardInterrupt):
        hfscale.save_state(run.model, tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    hfscale.load_state(run.model, tmp_path / "state")
