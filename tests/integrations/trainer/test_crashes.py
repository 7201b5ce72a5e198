"""Runs of a Trainer that are killed within a save go on from the newest whole checkpoint, and end where they would."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale.integrations.trainer.files import problem_of, resumed_from
from hfscale.testing import RankPool

from ...tiny_models import tiny
from .script import Rows, collate

Pools = Callable[[int], RankPool]
_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def trainer_of(out: Path, callbacks: Any = (), layout: Any = None, **more: Any) -> Any:
    torch.manual_seed(0)
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=1), dtype=torch.float32, parallel=layout
    )
    given = {
        "max_steps": 6,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        **more,
    }
    args = TrainingArguments(str(out), per_device_train_batch_size=2, use_cpu=True, **given)
    return hfscale.Trainer(
        model, args, data_collator=collate, train_dataset=Rows(12, 1), callbacks=[*callbacks]
    )


def train(trainer: Any, resume: Any = None) -> dict[str, torch.Tensor]:
    trainer.train(resume_from_checkpoint=resume)
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


class Killed(TrainerCallback):
    """A run whose copies are killed within the save at step 4, at every third file that it opens, renames or removes.

    Attributes:
        found: which checkpoint a run would have gone on from, after each.
        first: what the first one left that had written some files.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.child, self.found = out, False, list[str]()
        self.first = out.with_name("first")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step != 4:
            return
        for existing in (False, True):  # an older checkpoint of that name
            status = 9
            event = int(existing)
            while status == 9:
                event += 3
                if existing and not (self.out / "checkpoint-4").exists():
                    shutil.copytree(self.out / "checkpoint-2", self.out / "checkpoint-4")
                sys.stdout.flush()
                process = os.fork()
                if process == 0:
                    self._end_at(event)
                    return
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                self._look(event)
            shutil.rmtree(self.out / "checkpoint-4")

    def on_save(self, *_: Any, **__: Any) -> None:
        if self.child:
            os._exit(0)

    def _end_at(self, event: int) -> None:
        self.child, seen = True, list[str]()

        def hook(name: str, given: Any) -> None:
            if name in _CHANGES and str(self.out) in str(given[0]):
                seen.append(name)
                if len(seen) == event:
                    os._exit(9)

        sys.addaudithook(hook)

    def _look(self, event: int) -> None:
        last = get_last_checkpoint(str(self.out))
        assert last is not None
        assert problem_of(Path(last)) is None
        self.found.append(Path(last).name)
        if event == 39:
            shutil.copytree(self.out, self.first, dirs_exist_ok=True)


@pytest.mark.slow
def test_killed_at_any_file_of_a_save(tmp_path: Path) -> None:
    """What is there is whole; a run that goes on from it ends with the weights of one that was never killed."""
    kills = Killed(tmp_path / "out")
    whole = train(trainer_of(tmp_path / "out", [kills], save_total_limit=2))
    half = kills.found.index("checkpoint-4")
    assert half > 12  # all of the files come before the rename
    assert {*kills.found[:half]} == {"checkpoint-2"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    assert (kills.first / ".incomplete").exists()
    again = train(trainer_of(kills.first), resume=True)
    for name, value in whole.items():
        assert torch.equal(again[name], value), name
    assert not (kills.first / ".incomplete").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "out"
    train(trainer_of(out, max_steps=4))
    return out


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])


DAMAGED = [
    "trainer_state.json",
    "rng_state.pth",
    "scheduler.pt",
    "optimizer.pt",
    "model.safetensors",
]
DAMAGED += ["hfscale_state/state.json", "hfscale_state/complete.json"]


def test_the_newest_whole_checkpoint_is_taken(saved: Path, tmp_path: Path, caplog: Any) -> None:
    mesh = trainer_of(tmp_path / "none").runtime.mesh
    out = tmp_path / "out"
    for name in DAMAGED:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(saved, out)
        damage(out / "checkpoint-4" / name)
        caplog.clear()
        assert resumed_from(True, out, mesh) == str(out / "checkpoint-2"), name
        assert "checkpoint-4 has a damaged" in caplog.text
        with pytest.raises(
            CheckpointError, match=r"checkpoint-4 cannot be used.*checkpoint-2' is complete"
        ):
            resumed_from(str(out / "checkpoint-4"), out, mesh)
    damage(out / "checkpoint-2" / "trainer_state.json")
    with pytest.raises(
        CheckpointError,
        match=r"has no complete checkpoint to resume from: .*checkpoint-4 .*checkpoint-2 ",
    ):
        resumed_from(True, out, mesh)
    with pytest.raises(CheckpointError, match="must be a directory"):
        resumed_from(str(out / "checkpoint-9"), out, mesh)
    assert resumed_from(None, out, mesh) is None


def test_a_first_save_that_was_stopped_is_begun_again(tmp_path: Path, caplog: Any) -> None:
    mesh = trainer_of(tmp_path / "none").runtime.mesh
    assert resumed_from(True, tmp_path, mesh) is True  # which Trainer refuses
    (tmp_path / "checkpoint-2").mkdir()  # as transformers leaves it
    assert resumed_from(True, tmp_path, mesh) is None
    (tmp_path / "checkpoint-2").rename(tmp_path / ".incomplete")
    assert resumed_from(True, tmp_path, mesh) is None
    assert (
        caplog.text.count("has no complete checkpoint, because its first save was interrupted") == 2
    )


def test_rotation_keeps_whole_checkpoints_and_those_of_other_runs(
    saved: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    (out / "checkpoint-4" / "trainer_state.json").unlink()
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-90")
    trainer = trainer_of(out, max_steps=6, save_steps=6, save_total_limit=2)
    train(trainer)
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint-2",
        "checkpoint-6",
        "checkpoint-90",
    ]


def test_files_of_others_stay_in_a_checkpoint_that_is_replaced(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    (out / "checkpoint-2" / "notes.txt").write_text("best so far")
    (out / "checkpoint-2" / "adapter_model.safetensors").write_text("of another model")
    train(trainer_of(out, max_steps=2))
    assert (out / "checkpoint-2" / "notes.txt").exists()
    assert not (out / "checkpoint-2" / "adapter_model.safetensors").exists()


def resume(out: str, checkpoint: Any) -> str:
    trainer = trainer_of(Path(out), layout=ParallelConfig(tp_size=2))
    before = [value.clone() for value in trainer.model.state_dict().values()]
    with pytest.raises(CheckpointError) as caught:
        trainer.train(resume_from_checkpoint=checkpoint)
    after = trainer.model.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return str(caught.value)


def fail(out: str) -> str:
    """A rank whose disk is full, within Trainer's own part of a save."""
    trainer = trainer_of(Path(out), layout=ParallelConfig(tp_size=2), max_steps=2)

    def full(*_: Any) -> None:
        if trainer.is_world_process_zero():
            raise OSError(28, "No space left on device")

    trainer._save = full
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    return str(caught.value)


def test_every_rank_is_told(pools: Pools, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(saved, out)
    state = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())
    (out / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(state)[:-40])
    for message in pools(2).run(resume, str(out), str(out / "checkpoint-4")):
        assert "checkpoint-4 cannot be used: it has a damaged trainer_state.json" in message
    for message in pools(2).run(fail, str(tmp_path / "full")):
        assert "No space left on device" in message
    assert not [*(tmp_path / "full").iterdir()]
