"""Other ways to use a Trainer: predictions, models made late or wrapped by PEFT, workers that augment."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, TrainingArguments

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.replaced import attribute_replaced
from hfscale.testing import RankPool

from ...tiny_models import tiny
from .script import Rows, collate

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
TP2 = {"tp_size": 2}
DP2 = {"dp_shard_size": 2}
PP2 = {"pp_size": 2, "num_microbatches": 2}


def arguments(out: str, batch: int = 4, **given: Any) -> TrainingArguments:
    given = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, **given}
    return TrainingArguments(
        out, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **given
    )


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = str(tmp_path_factory.mktemp("start"))
    AutoModelForCausalLM.from_config(
        tiny("llama", num_hidden_layers=4), dtype=torch.float32
    ).save_pretrained(path)
    return path


def predictions(path: str, out: str, layout: Layout | None) -> Any:
    batch = 4 if layout is None else 4 // ParallelConfig(**layout).batch_world
    stock = layout is None
    load: Any = AutoModelForCausalLM if stock else hfscale
    more = {} if layout is None else {"parallel": ParallelConfig(**layout)}
    model = load.from_pretrained(path, dtype=torch.float32, **more)
    kind = transformers.Trainer if stock else hfscale.Trainer
    found = kind(model, arguments(out, batch), data_collator=collate).predict(Rows(11, 3))
    return found.predictions, found.label_ids, found.metrics["test_loss"]


@pytest.mark.parametrize("layout", [TP2, PP2, DP2])
def test_predictions_equal_one_process(
    pools: Pools, start: str, layout: Layout, tmp_path: Path
) -> None:
    logits, labels, loss = predictions(start, str(tmp_path), None)
    for ours, theirs, own in pools(2).run(predictions, start, str(tmp_path), layout):
        valid = labels != -100
        assert np.array_equal(theirs, labels)
        np.testing.assert_allclose(ours[valid], logits[valid], rtol=1e-4, atol=1e-5)
        assert own == pytest.approx(loss, rel=1e-5)


def made_late(path: str, out: str, layout: Layout) -> list[float]:
    """``model_init``, twice."""

    def init() -> Any:
        return hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), dtype=torch.float32)

    given = arguments(out, max_steps=2, logging_steps=1, gradient_accumulation_steps=2)
    trainer = hfscale.Trainer(
        model_init=init, args=given, data_collator=collate, train_dataset=Rows(32, 1)
    )
    losses = []
    for _ in range(2):
        trainer.train()
        losses.append(trainer.state.log_history[-1]["train_loss"])
    return losses


@pytest.mark.daily("layout1")
@pytest.mark.parametrize("layout", [TP2, PP2])
def test_models_made_late(pools: Pools, start: str, layout: Layout, tmp_path: Path) -> None:
    for first, second in pools(2).run(made_late, start, str(tmp_path), layout):
        assert first == second


def wrapped(path: str, out: str, layout: Layout) -> tuple[float, bool]:
    """PEFT's model around one of hfscale's, saved and gone on with."""
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), dtype=torch.float32)
    model = hfscale.get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    given = arguments(
        out, max_steps=4, save_strategy="steps", save_steps=2, logging_steps=1, learning_rate=1e-2
    )
    trainer = hfscale.Trainer(model, given, data_collator=collate, train_dataset=Rows(32, 1))
    trainer.train()
    whole = trainer.state.log_history[3]["loss"]
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-2")
    return whole, trainer.state.log_history[3]["loss"] == whole


@pytest.mark.daily("layout1")
@pytest.mark.parametrize("layout", [TP2, PP2, DP2])
def test_models_of_peft(pools: Pools, start: str, layout: Layout, tmp_path: Path) -> None:
    for _, again in pools(2).run(wrapped, start, str(tmp_path), layout):
        assert again
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").exists()


class Augmented(Rows):
    """Tokens of rows are replaced at random, in the workers."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {**row, "input_ids": torch.randint_like(row["input_ids"], 3, 67)}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        rows = Rows(16, 1)
        return (rows[index] for index in range(16))


def trained(path: str, out: str, kind: str) -> list[float]:
    """A step of ranks that share a batch compares it: it would not run otherwise."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(pp_size=2, num_microbatches=2), dtype=torch.float32
    )
    workers = {"dataloader_num_workers": 1} if kind == "workers" else {}
    rows = Augmented(16, 1) if kind == "workers" else Stream()
    torch.manual_seed(torch.distributed.get_rank())
    trainer = hfscale.Trainer(
        model,
        arguments(out, max_steps=3, logging_steps=1, **workers),
        data_collator=collate,
        train_dataset=rows,
    )
    torch.rand(torch.distributed.get_rank() + 1)  # random streams are where they are
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.daily("workers")
@pytest.mark.parametrize("kind", ["workers", "stream"])
def test_ranks_that_share_a_batch_are_given_the_same(
    pools: Pools, start: str, kind: str, tmp_path: Path
) -> None:
    one, other = pools(2).run(trained, start, str(tmp_path), kind)
    assert len(one) == 3
    assert one == other


class WatchedLoss(hfscale.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def what_is_said(path: str, out: str, kind: type, rows: int) -> list[str]:
    model = hfscale.from_pretrained(path, dtype=torch.float32, parallel=ParallelConfig(**DP2))
    trainer = kind(
        model,
        arguments(out, 2, num_train_epochs=2),
        data_collator=collate,
        train_dataset=Rows(rows, 1),
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    return [str(each.message) for each in said if "counts them twice" in str(each.message)]


def test_a_loss_of_ones_own_is_told_of_examples_that_count_twice(
    pools: Pools, start: str, tmp_path: Path
) -> None:
    first, second = pools(2).run(what_is_said, start, str(tmp_path), WatchedLoss, 6)
    assert first == []
    assert len(second) == 1
    assert "dataloader_drop_last=True" in second[0]
    for kind, rows in ((WatchedLoss, 8), (hfscale.Trainer, 6)):
        assert pools(2).run(what_is_said, start, str(tmp_path), kind, rows) == [[], []]


class Few(IterableDataset):
    def __iter__(self) -> Any:
        return iter([dict(row) for row in Rows(3, 1)])


def evaluated(out: str) -> list[float]:
    model = hfscale.from_config(tiny("llama"), parallel=ParallelConfig(tp_size=2))
    given = TrainingArguments(
        out, use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=2
    )
    trainer = hfscale.Trainer(model, given, data_collator=collate)
    return [trainer.evaluate(rows)["eval_loss"] for rows in (Rows(3, 1), Few())]


def test_a_streams_last_rows_count_once_in_evaluation(pools: Pools, tmp_path: Path) -> None:
    for listed, streamed in pools(2).run(evaluated, str(tmp_path)):
        assert streamed == pytest.approx(listed, rel=1e-6)


def test_the_list_of_callbacks_is_the_users(start: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(start)
    stock = transformers.Trainer(model, arguments(str(tmp_path))).callback_handler.callback_list
    assert hfscale.Trainer(model, arguments(str(tmp_path))).callback_handler.callback_list == stock


def _in_the_place_of_stock(start: str, out: str) -> list[float]:
    """Train on 11 rows, of which data ranks cut the last step short, with our class where scripts import stock's."""
    losses = []
    for name in ("Trainer", "Seq2SeqTrainer"):
        kind = getattr(hfscale, name)
        sequences = {"Seq2SeqTrainer": transformers.Seq2SeqTrainingArguments}
        made = sequences.get(name, TrainingArguments)
        given = made(
            out,
            per_device_train_batch_size=2,
            num_train_epochs=1,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        with attribute_replaced(transformers, name, kind):
            model = hfscale.from_pretrained(start, parallel=ParallelConfig(**DP2))
            trainer = getattr(transformers, name)(
                model, given, data_collator=collate, train_dataset=Rows(11, 1)
            )
            trainer.train()
            assert type(trainer.optimizer.optimizer).__module__.startswith("hfscale")
        losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses


def test_ours_in_the_place_of_stocks_name(pools: Pools, start: str, tmp_path: Path) -> None:
    for losses in pools(2).run(_in_the_place_of_stock, start, str(tmp_path)):
        assert len(losses) == 6
        assert losses[:3] == losses[3:]
