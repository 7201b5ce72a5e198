"""Classes that take their loss themselves: Trainer adds up the means of accumulated batches, however many labels each
of them has.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForTokenClassification

import hfscale
from hfscale import ParallelConfig
from hfscale.models.clone import tiny_clone
from hfscale.testing import RankPool

from .test_uses import arguments

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
CLASSES = {"bert": AutoModelForTokenClassification, "t5": AutoModelForSeq2SeqLM}
SAID = ("loss", "grad_norm", "eval_loss", "train_loss")


class Uneven(Dataset):
    """Rows of which some have one label and some have twelve."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 60, (12,), generator=torch.Generator().manual_seed(index))
        return {
            "input_ids": ids,
            "labels": (ids % 2).masked_fill(torch.arange(12) > (index * 5) % 12, -100),
        }


def logged(path: str, out: str, family: str, layout: Layout | None) -> list[dict[str, float]]:
    parallel = None if layout is None else ParallelConfig(**layout)
    load: Any = CLASSES[family] if parallel is None else hfscale
    more = {} if parallel is None else {"parallel": parallel, "auto_class": CLASSES[family]}
    model = load.from_pretrained(path, dtype=torch.float64, **more)
    given = {
        "eval_strategy": "epoch",
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "num_train_epochs": 1,
    }
    args = arguments(out, 4 // (1 if parallel is None else parallel.batch_world), **given)
    kind = transformers.Trainer if parallel is None else hfscale.Trainer
    trainer = kind(model, args, train_dataset=Uneven(14), eval_dataset=Uneven(5))
    trainer.train()
    return [{name: row[name] for name in SAID if name in row} for row in trainer.state.log_history]


@pytest.mark.daily("t5")
@pytest.mark.parametrize("family", CLASSES)
def test_logs_equal_one_process(pools: Pools, tmp_path: Path, family: str) -> None:
    """Also where a data rank has no row of the last batch."""
    torch.manual_seed(0)
    config = tiny_clone(
        AutoConfig.for_model(family), layers=4, decoder_start_token_id=0, pad_token_id=0
    )
    CLASSES[family].from_config(config).save_pretrained(tmp_path / "model")
    stock = logged(str(tmp_path / "model"), str(tmp_path), family, None)
    assert len(stock) == 4
    for layout in ({"pp_size": 2, "num_microbatches": 4}, {"dp_shard_size": 2}):
        for found in pools(2).run(logged, str(tmp_path / "model"), str(tmp_path), family, layout):
            for ours, theirs in zip(found, stock, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-6), layout
