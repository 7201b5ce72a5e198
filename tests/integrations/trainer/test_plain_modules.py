"""A module that is no model of transformers trains in hfscale's trainers as in stock ones, in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Seq2SeqTrainingArguments, TrainingArguments

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
TIMES = ("runtime", "per_second", "flos")


class Net(nn.Module):
    """A classifier of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _made() -> Net:
    torch.manual_seed(0)
    return Net()


def _rows() -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(4), "labels": index % 2} for index in range(16)]


def _run(kind: Any, directory: Path, **given: Any) -> tuple[list[Any], Tensor]:
    """Train, evaluate, save and resume; return what was logged, and the weights."""
    rows = _rows()
    sequences = issubclass(kind, transformers.Seq2SeqTrainer)
    arguments = (Seq2SeqTrainingArguments if sequences else TrainingArguments)(
        output_dir=str(directory),
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
    )
    trainer = kind(args=arguments, train_dataset=rows, eval_dataset=rows, **given)
    assert isinstance(trainer, kind)
    trainer.train()
    logged = [*trainer.state.log_history, trainer.evaluate()]
    trainer.train(resume_from_checkpoint=str(directory / "checkpoint-2"))
    logged += trainer.state.log_history
    kept = [
        {key: value for key, value in row.items() if not any(time in key for time in TIMES)}
        for row in logged
    ]
    return kept, trainer.model.layer.weight.detach()


@pytest.mark.parametrize("by", ["model", "model_init"])
@pytest.mark.parametrize("name", ["Trainer", "Seq2SeqTrainer"])
def test_it_trains_as_in_stock_code(tmp_path: Path, name: str, by: str) -> None:
    found: list[Any] = []
    for library in (transformers, hfscale):

        class Own(getattr(library, name)):  # type: ignore[misc]
            """A script's own subclass, whose methods are called in between."""

            calls = 0

            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                Own.calls += 1
                return super().compute_loss(*args, **kwargs)

        given = {"model": _made()} if by == "model" else {"model_init": _made}
        found.append(_run(Own, tmp_path / library.__name__, **given))
        assert Own.calls == 14  # 8 batches, 2 of an evaluation, and 4 once resumed
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


class Around(nn.Module):
    """A module around PEFT's model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny("llama"))
        self.inside = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))

    def forward(self, **batch: Tensor) -> Any:
        return self.inside(**batch)


def _on_devices(devices: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny("llama"))
    model.hf_device_map = devices  # type: ignore[assignment]
    return model


HOLDING = {
    "around": (Around, False),
    "compiled": (lambda: torch.compile(Around().inside, backend="eager"), False),
    "one device": (lambda: _on_devices({"": "cpu"}), True),
    "several devices": (lambda: _on_devices({"model": "cpu", "lm_head": "meta"}), False),
}


@pytest.mark.filterwarnings("ignore:.*`past_key_values`:FutureWarning")
@pytest.mark.parametrize("kind", HOLDING)
def test_what_holds_a_model_trains_as_in_stock_code(tmp_path: Path, kind: str) -> None:
    """As do models that lie on several devices; a ``device_map`` of one is of an ordinary model."""
    make, ours = HOLDING[kind]
    ids = torch.arange(24).reshape(4, 6)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    logged = []
    for library in (transformers, hfscale):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            logging_steps=1,
            save_strategy="no",
            remove_unused_columns=False,
            report_to="none",
            use_cpu=True,
        )
        trainer = library.Trainer(make(), arguments, train_dataset=rows)
        assert hasattr(trainer, "runtime") == (ours and library is hfscale)
        trainer.train()
        logged.append([row["loss"] for row in trainer.state.log_history[:3]])
    assert logged[0] == pytest.approx(logged[1], rel=1e-6)


def _over_ranks(directory: str) -> None:
    arguments = TrainingArguments(output_dir=directory, report_to="none", use_cpu=True)
    with pytest.raises(ConfigError, match="got Net"):
        hfscale.Trainer(_made(), arguments, parallel=ParallelConfig(tp_size=2))


def test_over_ranks_it_is_refused_in_words(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(_over_ranks, str(tmp_path))
