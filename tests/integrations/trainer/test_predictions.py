"""Outputs that ``predict`` returns through stages: all that stock Trainer returns, also of rows without labels."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    T5Config,
    TrainingArguments,
)

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool

from ...tiny_models import tiny
from .script import Rows, collate

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
PP2 = {"pp_size": 2, "num_microbatches": 2}
_T5 = T5Config(
    vocab_size=67,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_heads=4,
    num_layers=2,
    decoder_start_token_id=0,
    pad_token_id=0,
    dropout_rate=0.0,
)
CLASSES: dict[str, tuple[Any, Any]] = {
    "AutoModelForCausalLM": (AutoModelForCausalLM, tiny("llama")),
    "AutoModelForSequenceClassification": (
        AutoModelForSequenceClassification,
        tiny("llama", num_labels=1, pad_token_id=0),
    ),
    "AutoModelForSeq2SeqLM": (AutoModelForSeq2SeqLM, _T5),
}


def unlabelled(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = collate(rows)
    del batch["labels"]
    return batch


def predict(
    kind: str,
    path: str,
    out: str,
    layout: Layout | None,
    labelled: bool,
    changes: dict[str, Any],
    ignored: list[str] | None,
) -> tuple[Any, ...]:
    """Predictions for eleven rows, in batches of four, as a tuple."""
    load: dict[str, Any] = {"dtype": torch.float64, **changes}
    if layout is None:
        model = CLASSES[kind][0].from_pretrained(path, **load)
    else:
        load["parallel"] = ParallelConfig(**layout)
        model = hfscale.from_pretrained(path, auto_class=kind, **load)
    args = TrainingArguments(
        out, per_device_eval_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True
    )
    trainer_class: Any = transformers.Trainer if layout is None else hfscale.Trainer
    trainer = trainer_class(model, args, collate if labelled else unlabelled)
    with keep_float64():
        found = trainer.predict(Rows(11, 3), ignore_keys=ignored).predictions
    return found if isinstance(found, tuple) else (found,)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for name, (kind, config) in CLASSES.items():
        torch.manual_seed(0)
        made[name] = str(tmp_path_factory.mktemp(name))
        kind.from_config(config, dtype=torch.float64).save_pretrained(made[name])
    return made


@pytest.mark.daily("AutoModelForSequenceClassification-False", "AutoModelForSeq2SeqLM-True")
@pytest.mark.parametrize(
    ("kind", "labelled"),
    [
        ("AutoModelForCausalLM", False),
        ("AutoModelForSequenceClassification", False),
        ("AutoModelForSeq2SeqLM", True),
    ],
)
def test_predictions_through_stages_are_those_of_one_process(
    pools: Pools, paths: dict[str, str], kind: str, labelled: bool, tmp_path: Path
) -> None:
    given = (kind, paths[kind], str(tmp_path))
    expected = predict(*given, None, labelled, {}, None)
    assert len(expected) == (2 if kind == "AutoModelForSeq2SeqLM" else 1)
    for found in pools(2).run(predict, *given, PP2, labelled, {}, None):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._rows[index] for index in range(len(self._rows)))


def counts(path: str, out: str, layout: Layout) -> list[int]:
    """Predictions of a stream whose last batch is not full, and then of rows without labels."""
    parallel = ParallelConfig(**layout)
    model = hfscale.from_pretrained(path, dtype=torch.float64, parallel=parallel)
    args = TrainingArguments(
        out,
        per_device_eval_batch_size=4 // parallel.batch_world,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = hfscale.Trainer(model, args, collate)
    found = [trainer.predict(Stream(Rows(11, 3)))]
    trainer.data_collator = unlabelled
    found += [trainer.predict(Rows(8, 3)), trainer.predict(Stream(Rows(11, 3)))]
    return [len(each.predictions) for each in found]


@pytest.mark.daily("layout1")
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_shard_size": 2}])
def test_rows_without_labels_are_all_predicted_after_a_stream(
    pools: Pools, paths: dict[str, str], layout: Layout, tmp_path: Path
) -> None:
    """Of which none pads a batch, although the stream's last batch had fewer rows."""
    for found in pools(2).run(counts, paths["AutoModelForCausalLM"], str(tmp_path), layout):
        assert found == [11, 8, 11]


def label_ids(path: str, out: str, layout: Layout | None) -> Any:
    """Of an evaluation whose metrics look at attention masks, too."""
    load: dict[str, Any] = {"dtype": torch.float64}
    if layout is None:
        model = AutoModelForCausalLM.from_pretrained(path, **load)
    else:
        model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), **load)
    args = TrainingArguments(
        out,
        per_device_eval_batch_size=4,
        label_names=["labels", "attention_mask"],
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    kind: Any = transformers.Trainer if layout is None else hfscale.Trainer
    return kind(model, args, collate).predict(Rows(7, 3)).label_ids


def test_labels_of_several_names_reach_metrics_through_stages(
    pools: Pools, paths: dict[str, str], tmp_path: Path
) -> None:
    given = (paths["AutoModelForCausalLM"], str(tmp_path))
    expected = label_ids(*given, None)
    for found in pools(2).run(label_ids, *given, PP2):
        assert len(found) == len(expected) == 2
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def told(path: str, out: str) -> str:
    try:
        changes = {"output_hidden_states": True}
        predict("AutoModelForCausalLM", path, out, PP2, True, changes, None)
    except ConfigError as error:
        return str(error)
    return ""


def test_outputs_of_all_layers_are_refused_unless_ignored(
    pools: Pools, paths: dict[str, str], tmp_path: Path
) -> None:
    given = ("AutoModelForCausalLM", paths["AutoModelForCausalLM"], str(tmp_path))
    for message in pools(2).run(told, *given[1:]):
        assert "hidden_states" in message
        assert "ignore_keys=['hidden_states']" in message
    changes = {"output_hidden_states": True}
    ignored = ["hidden_states"]
    (expected,) = predict(*given, None, True, changes, ignored)
    for (found,) in pools(2).run(predict, *given, PP2, True, changes, ignored):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
