"""Classes that take their loss themselves: Trainer adds up the means of accumulated batches, however many labels each
of them has; but of one batch, data ranks count each label alike.
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

from .test_items_in_batch import SMALL
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
                assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True), layout


def answers(index: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a question; some begin or end outside of the row, and are ignored."""
    places = {"start_positions": index * 7 % 19, "end_positions": index * 5 % 23}
    return {"input_ids": ids, **{name: torch.tensor(place) for name, place in places.items()}}


def few_labels(index: int, ids: torch.Tensor, ignored: int = -100) -> torch.Tensor:
    return ids.masked_fill(torch.arange(len(ids)) > index * 5 % 12, ignored)


def choices(index: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack([ids, ids.flip(0)]), "labels": sometimes(index)}


def sometimes(index: int) -> torch.Tensor:
    return torch.tensor(index % 2 if index % 3 else -100)


def two_heads(index: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = {"labels": few_labels(index, ids), "next_sentence_label": sometimes(index)}
    return {"input_ids": ids, **labels}


def speech(index: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_features": drawn(index, 80, 20), "labels": few_labels(index, ids)}


def pixels(index: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    picture = drawn(index, 3, 32, 32)
    labels = few_labels(index, (picture[0] > 0).long().flatten()[: 12 * 85], 255)
    return {"pixel_values": picture, "labels": torch.nn.functional.pad(labels, (0, 4)).view(32, 32)}


def spoken(index: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of different lengths, with different numbers of labels."""
    heard = (torch.arange(64) < 40 + index * 7 % 24).long()
    labels = few_labels(index, ids[:6])
    return {"input_values": drawn(index, 64) * heard, "attention_mask": heard, "labels": labels}


def weighted(index: int, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "labels": few_labels(index, (ids * (ids > 50) > 0).long())}


class Weighted(transformers.BertForTokenClassification):
    """Its classes have weights."""

    def forward(self, input_ids: Any, labels: Any = None, **given: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids, **given)
        if labels is not None:
            weight = torch.tensor([0.1, 1.0], dtype=output.logits.dtype)
            loss = torch.nn.CrossEntropyLoss(weight)
            output.loss = loss(output.logits.flatten(0, 1), labels.flatten())
        return output


def drawn(index: int, *size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(size, generator=generator, dtype=torch.float64)


class Made(Dataset):
    """Rows that a function makes."""

    def __init__(self, rows: int, make: Any) -> None:
        self.rows = rows
        self.make = make

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 60, (12,), generator=torch.Generator().manual_seed(index))
        return self.make(index, ids)


def small(family: str) -> Any:
    """A config of a family; its model has no dropout."""
    if family == "segformer":
        sizes: dict[str, Any] = {
            "hidden_sizes": [16, 32], "depths": [1, 1], "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2],
            "num_attention_heads": [2, 2], "mlp_ratios": [2, 2], "num_encoder_blocks": 2, "decoder_hidden_size": 16,
        }  # fmt: skip
        return transformers.SegformerConfig(**sizes, num_labels=2)
    if family.startswith("wav2vec2"):
        reduction = family.partition(" ")[2]
        return transformers.Wav2Vec2Config(**SMALL, vocab_size=60, ctc_loss_reduction=reduction)
    more = {"max_source_positions": 10} if family == "whisper" else {"num_labels": 2}
    config = AutoConfig.for_model(family, **more)
    return tiny_clone(config, layers=2, decoder_start_token_id=0, pad_token_id=0)


ONLY_KNOWN_TO_THE_MODEL = {
    "answers": (transformers.AutoModelForQuestionAnswering, "bert", answers),
    "answers of a decoder": (transformers.AutoModelForQuestionAnswering, "llama", answers),
    "choices": (transformers.AutoModelForMultipleChoice, "bert", choices),
    "two heads": (transformers.AutoModelForPreTraining, "bert", two_heads),
    "speech": (transformers.AutoModelForSpeechSeq2Seq, "whisper", speech),
    "speech, a mean over rows": (transformers.AutoModelForCTC, "wav2vec2 mean", spoken),
    "speech, a sum over rows": (transformers.AutoModelForCTC, "wav2vec2 sum", spoken),
    "classes with weights": (Weighted, "bert", weighted),
    "pixels": (transformers.AutoModelForSemanticSegmentation, "segformer", pixels),
}


def trained(path: str, out: str, case: str, layout: Layout | None) -> list[dict[str, float]]:
    auto_class, family, make = ONLY_KNOWN_TO_THE_MODEL[case]
    parallel = None if layout is None else ParallelConfig(**layout)
    load: Any = auto_class if parallel is None else hfscale
    more = {} if parallel is None else {"parallel": parallel, "auto_class": auto_class}
    model = load.from_pretrained(path, dtype=torch.float64, **more)
    given = {"gradient_accumulation_steps": 2, "logging_steps": 1, "num_train_epochs": 1}
    args = arguments(out, 4 // (1 if parallel is None else parallel.batch_world), **given)
    kind = transformers.Trainer if parallel is None else hfscale.Trainer
    # The statistics of pixels' batch norm are those of a rank: they are evaluated alone.
    data = {"train_dataset": Made(24, make), "eval_dataset": Made(5, make)}
    trainer = kind(model, args, **data)
    if family != "segformer":
        trainer.train()
    trainer.evaluate()
    return [{name: row[name] for name in SAID if name in row} for row in trainer.state.log_history]


@pytest.mark.daily("answers", "speech, a sum over rows", "classes with weights")
@pytest.mark.parametrize("case", ONLY_KNOWN_TO_THE_MODEL)
def test_losses_that_only_the_model_knows_count_each_label_alike(
    pools: Pools, tmp_path: Path, case: str
) -> None:
    """Also where a rank's last row only pads its batch."""
    auto_class, family, _ = ONLY_KNOWN_TO_THE_MODEL[case]
    torch.manual_seed(0)
    config = small(family)
    model = auto_class(config) if auto_class is Weighted else auto_class.from_config(config)
    model.save_pretrained(tmp_path / "model")
    stock = trained(str(tmp_path / "model"), str(tmp_path), case, None)
    assert len(stock) == (1 if family == "segformer" else 5)
    for layout in ({"dp_shard_size": 2}, {"dp_replicate_size": 2}):
        for found in pools(2).run(trained, str(tmp_path / "model"), str(tmp_path), case, layout):
            for ours, theirs in zip(found, stock, strict=True):
                # Trainer adds up its losses in float32.
                assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True), layout
                if "grad_norm" in theirs:
                    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-10)
