"""A module that is no model of transformers trains in hfscale's trainers as in stock ones, in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Seq2SeqTrainingArguments, TrainingArguments

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool

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


def _over_ranks(directory: str) -> None:
    arguments = TrainingArguments(output_dir=directory, report_to="none", use_cpu=True)
    with pytest.raises(ConfigError, match="got Net"):
        hfscale.Trainer(_made(), arguments, parallel=ParallelConfig(tp_size=2))


def test_over_ranks_it_is_refused_in_words(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(_over_ranks, str(tmp_path))
