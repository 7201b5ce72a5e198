"""A Trainer that goes on from memory is the one that did not stop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

import hfscale
from hfscale.recipes.trainer import MemoryUntilWritten
from hfscale.testing import RankPool

from ...tiny_models import tiny
from .script import Case, Rows, _without_times, arguments, build, collate
from .test_checkpoints import weights

Pools = Callable[[int], RankPool]
CASE = Case({"save_strategy": "steps", "save_steps": 3}, metrics=False, dropout=0.1)


class Dies(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Others see nothing of saves to memory.
        assert control.should_save == (state.global_step % 3 == 0)
        if state.global_step == self.step:
            raise RuntimeError("killed")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert Path(args.output_dir, f"checkpoint-{state.global_step}").is_dir()


def attempt(path: str, root: str, dies: int, resume: bool) -> list[dict[str, float]]:
    kept = hfscale.StatesInMemoryCallback(2, memory=root)
    trainer = hfscale.Trainer(
        model=build(CASE, path, {"dp_shard_size": 2}),
        args=arguments(CASE, f"{root}/out", 2),
        data_collator=collate,
        train_dataset=Rows(22, 1),
        eval_dataset=Rows(10, 2),
        callbacks=[kept, Dies(dies)],
    )
    if dies:
        with pytest.raises(RuntimeError, match="killed"):
            trainer.train(resume_from_checkpoint=resume)
        hfscale.wait_for_saves()
        torch.distributed.barrier()  # one rank removes the state before
        return [len(list(kept.states.directory.iterdir()))] if kept.states else []
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{root}/final")
    assert not list(Path(root).glob("hfscale-*"))  # the memory is free again
    rows = [_without_times(row) for row in trainer.state.log_history]
    return [row for row in rows if "train_loss" not in row]


def stop_and_go(path: str, whole: str, parts: str) -> None:
    expected = attempt(path, whole, 0, False)
    assert attempt(path, parts, 3, False) == [1]  # after the save of step 2
    # Goes on from 2, saves 3 to the disk and 4 to memory.
    assert attempt(path, parts, 5, True) == [1]
    assert attempt(path, parts, 0, True) == expected
    found = {path.name for path in Path(parts, "out").iterdir()}
    assert found >= {"checkpoint-3"}


def test_a_run_goes_on_bit_by_bit(pools: Pools, tmp_path: Path) -> None:
    torch.manual_seed(0)
    start = str(tmp_path / "start")
    transformers.AutoModelForCausalLM.from_config(
        tiny("llama"), dtype=torch.float32
    ).save_pretrained(start)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    pools(2).run(stop_and_go, start, str(tmp_path / "whole"), str(tmp_path / "parts"))
    expected = weights(tmp_path / "whole" / "final")
    found = weights(tmp_path / "parts" / "final")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_when_the_memory_is_freed() -> None:
    """Behind a Trainer's last step, also if it comes early; in a recipe once its results are written."""
    stopped = transformers.TrainerState(global_step=2, max_steps=8)
    for kept, calls in ((hfscale.StatesInMemoryCallback(2), 1), (MemoryUntilWritten(2), 0)):
        kept.states = states = Mock()
        kept.on_train_end(None, stopped, None)
        assert states.remove.call_count == calls
        kept.free()
        assert states.remove.call_count == 1
        assert kept.states is None


def test_a_save_to_the_disk_is_enough() -> None:
    kept = hfscale.StatesInMemoryCallback(2)
    control = transformers.TrainerControl()
    state = transformers.TrainerState()
    state.global_step = 4
    state.max_steps = 8
    kept.on_step_end(None, state, control)
    assert kept.due
    assert not control.should_save
    kept.on_save(None, state, control)
    assert not kept.due
