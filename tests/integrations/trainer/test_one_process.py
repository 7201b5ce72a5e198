"""In one process a Trainer takes what is refused for reasons of several ranks, and computes what stock Trainer does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, default_data_collator

import hfscale
from hfscale import ConfigError
from hfscale._compat import liger

from ...tiny_models import tiny

IDS = torch.randint(3, 67, (12, 8), generator=torch.Generator().manual_seed(3))
ROWS = [{"input_ids": ids, "labels": ids} for ids in IDS]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(ROWS)


ASKED: dict[str, dict[str, Any]] = {
    "reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "neftune": {"neftune_noise_alpha": 5.0},
    "batch_size": {"auto_find_batch_size": True},
    "dispatch": {"accelerator_config": {"dispatch_batches": True}},
}


def trained(kind: Any, asked: dict[str, Any], out: Path) -> list[float]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float32)
    given = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        **asked,
    }
    args = transformers.TrainingArguments(
        str(out), use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-2, seed=3, **given
    )
    rows = Stream() if "accelerator_config" in asked else ROWS
    trainer = kind(model=model, args=args, train_dataset=rows, data_collator=default_data_collator)
    assert [type(each).__name__ for each in trainer.callback_handler.callbacks] == [
        "DefaultFlowCallback",
        "PrinterCallback",
    ]
    trainer.train()
    return [
        row[key]
        for row in trainer.state.log_history
        if "loss" in row
        for key in ("loss", "grad_norm")
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ASKED)
def test_options_are_those_of_stock(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = trained(transformers.Trainer, ASKED[name], tmp_path)
    found = trained(hfscale.Trainer, ASKED[name], tmp_path)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("optim", "expected"), [("adamw_torch", True), ("lomo", False), ("adalomo", False)]
)
def test_optimizers_that_step_in_the_backward_pass_get_stock_steps(
    optim: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], optim=optim)
    trainer = hfscale.Trainer(
        model=AutoModelForCausalLM.from_config(tiny("llama")), args=args, train_dataset=ROWS
    )
    assert trainer.uses_train_step is expected


def test_plans_look_at_every_option() -> None:
    with pytest.raises(ConfigError, match="compile must be True, False or one of"):
        hfscale.plan(tiny("llama"), compile="nonsense")


def test_a_module_of_another_kind_is_not_told_to_be_loaded() -> None:
    with pytest.raises(ConfigError, match="Linear is not a model of transformers"):
        hfscale.clip_grad_norm_(nn.Linear(2, 2), 1.0)


def test_an_evaluated_model_with_kernels_returns_logits(tmp_path: Path) -> None:
    """Trainer would pass ``skip_logits`` to a model whose loss alone is asked for."""
    given = []

    class OwnLoss(hfscale.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            given.append({*inputs})
            outputs = model(**inputs)
            return outputs.loss, outputs

    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, use_liger_kernel=True
    )
    model = AutoModelForCausalLM.from_config(tiny("llama"))
    trainer = OwnLoss(model=model, args=args, data_collator=default_data_collator)
    args.prediction_loss_only = True
    assert trainer.evaluate(ROWS)["eval_loss"] > 0
    trainer.prediction_step(
        trainer.model, default_data_collator(ROWS), True
    )  # of a loop of one's own
    assert given == [{"input_ids", "labels"}] * len(given)
    assert len(given) > 1
    assert args.use_liger_kernel


def test_a_trainer_needs_kernels_no_sooner_than_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in stock, which looks for Liger when training begins; predictions do without."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(liger, "is_installed", lambda: False)
    monkeypatch.setattr(transformers.integrations.liger, "is_liger_kernel_available", lambda: False)
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, use_liger_kernel=True
    )
    model = AutoModelForCausalLM.from_config(tiny("llama"))
    trainer = hfscale.Trainer(
        model=model, args=args, train_dataset=ROWS, data_collator=default_data_collator
    )
    assert trainer.predict(ROWS).predictions.shape == (12, 8, 67)
    with pytest.raises(ImportError, match="pip install liger-kernel"):
        trainer.train()
