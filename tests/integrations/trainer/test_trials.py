"""Runs of one Trainer with ``model_init``, each of which trains another model, as a search for hyperparameters does."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils.memory import release_memory
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...tiny_models import tiny
from .script import Case, Rows, arguments, build, collate

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
DP2 = {"dp_shard_size": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32).save_pretrained(made)
    return made


def trainer_of(case: Case, path: str, out: str, layout: Layout | None) -> Any:
    kind: Any = transformers.Trainer if layout is None else hfscale.Trainer
    return kind(
        args=arguments(case, out, 1 if layout is None else ParallelConfig(**layout).batch_world),
        model_init=lambda: build(case, path, layout),
        data_collator=collate,
        train_dataset=Rows(12, 1),
        eval_dataset=Rows(6, 2),
    )


def two_trials(path: str, out: str, layout: Layout | None) -> list[list[float]]:
    """Losses of two trials, between which the model is released, as transformers does on the first rank."""
    trainer = trainer_of(Case({"max_steps": 2}), path, out, layout)
    losses = []
    for rate in (1e-2, 3e-2):
        trainer.args.learning_rate = rate
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        losses[-1].append(trainer.evaluate()["eval_loss"])
        trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
        trainer.accelerator.clear()
    return losses


@pytest.mark.daily("layout0")
@pytest.mark.parametrize("layout", [DP2, {"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}])
def test_a_second_trial_begins_without_a_model(
    pools: Pools, path: str, layout: Layout, tmp_path: Path
) -> None:
    expected = two_trials(path, str(tmp_path / "stock"), None)
    for found in pools(2).run(two_trials, path, str(tmp_path / "ours"), layout):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def left_over(path: str, out: str) -> int:
    """How many models there are besides that of the last of three runs."""
    trainer = trainer_of(Case({"max_steps": 1, "eval_strategy": "no"}), path, out, DP2)
    made = [weakref.ref(trainer.model)]
    for _ in range(3):
        trainer.train()
        made.append(weakref.ref(trainer.model))
    gc.collect()
    return sum(each() is not None for each in made[:-1])


def test_models_of_earlier_runs_are_freed(pools: Pools, path: str, tmp_path: Path) -> None:
    assert pools(2).run(left_over, path, str(tmp_path)) == [0, 0]
