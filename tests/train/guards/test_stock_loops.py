"""Loops that take every process for a data-parallel one are refused before their first step; one process is free."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...refusals import refusal_of
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(6) * (index + 3)) % 67
        return {"input_ids": ids, "labels": ids}


class OwnTrainer(Trainer):
    """A subclass with a step of its own, as TRL's have."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss


def arguments(directory: str) -> TrainingArguments:
    return TrainingArguments(
        directory, use_cpu=True, max_steps=2, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        save_strategy="no", learning_rate=1e-2, optim="sgd", logging_strategy="no",
    )  # fmt: skip


def try_trainers(layout: dict[str, int], directory: str) -> list[str]:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(**layout))
    calls = [
        lambda: Trainer(model, arguments(directory), train_dataset=Rows()).train(),
        lambda: OwnTrainer(model, arguments(directory), train_dataset=Rows()).train(),
        lambda: Trainer(model, arguments(directory), eval_dataset=Rows()).evaluate(),
        lambda: accelerate.Accelerator().prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        ),
        lambda: accelerate.Accelerator().prepare(torch.nn.ModuleDict({"inside": model})),
    ]
    return [refusal_of(call) for call in calls]


@pytest.mark.daily("layout2")
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_shard_size": 2}, {"pp_size": 2}])
def test_several_ranks_are_refused_before_the_first_step(
    pools: Pools, layout: dict[str, int], tmp_path: Path
) -> None:
    for messages in pools(2).run(try_trainers, layout, str(tmp_path)):
        for message in messages:
            assert f"spread over {ParallelConfig(**layout).describe()} by hfscale" in message
            assert "hfscale.train_step(model, batch)" in message


def test_one_process_trains_as_stock_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "start")
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "start"),
        hfscale.from_pretrained(tmp_path / "start"),
    ]
    for model in models:
        Trainer(model, arguments(str(tmp_path)), train_dataset=Rows()).train()
    stock, ours = (model.state_dict() for model in models)
    for name, value in stock.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
