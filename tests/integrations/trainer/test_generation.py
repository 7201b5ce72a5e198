"""Tokens that a Trainer generates as it evaluates, in every layout: those of one process, and so the same metrics."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, BartConfig, Seq2SeqTrainingArguments, T5Config

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool

from .script import collate

Pools = Callable[[int], RankPool]
Layout = dict[str, Any]
_END = 1


class Pairs(torch.utils.data.Dataset):
    """Texts and what is to be made of them: their first tokens, in the other order."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
        self.texts = [torch.randint(3, 20, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.texts[index]
        return {
            "input_ids": text,
            "labels": torch.cat((text[: len(text) // 2].flip(0), torch.tensor([_END]))),
        }


def metrics(prediction: Any) -> dict[str, float]:
    ids = prediction.predictions
    labels = prediction.label_ids
    return {
        "rows": float(len(ids)),
        "sum": float((ids * (ids > 0)).sum()),
        "labels": float(labels.sum()),
    }


def trainer_of(path: str, out: str, layout: Layout | None, kind: Any = None) -> Any:
    if layout is None:
        model = AutoModelForSeq2SeqLM.from_pretrained(path)
        world = 1
    else:
        parallel = ParallelConfig(**layout)
        model = hfscale.from_pretrained(path, parallel=parallel, auto_class=AutoModelForSeq2SeqLM)
        world = parallel.batch_world
    args = Seq2SeqTrainingArguments(
        out,
        predict_with_generate=True,
        generation_max_length=12,
        per_device_train_batch_size=4 // world,
        per_device_eval_batch_size=4 // world,
        max_steps=4,
        learning_rate=2e-2,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    kind = kind or (transformers.Seq2SeqTrainer if layout is None else hfscale.Seq2SeqTrainer)
    rows = Pairs(9)
    collator = collate
    return kind(model, args, collator, rows, rows, compute_metrics=metrics)


def run(path: str, out: str, layout: Layout | None) -> dict[str, Any]:
    trainer = trainer_of(path, out, layout)
    before = trainer.predict(trainer.eval_dataset)  # before the first step
    trainer.train()
    after = trainer.predict(trainer.eval_dataset, num_beams=2, max_length=9)
    logs = [{key: row[key] for key in row if key in KEPT} for row in trainer.state.log_history]
    ids = [*before.predictions.tolist(), *after.predictions.tolist()]
    return {"logs": logs, "ids": ids, "labels": after.label_ids.tolist()}


KEPT = ("step", "eval_loss", "eval_rows", "eval_sum", "eval_labels", "train_loss")
CONFIGS = {
    "t5": T5Config(
        vocab_size=24, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "bart": BartConfig(
        vocab_size=24, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, pad_token_id=0, bos_token_id=2,
        eos_token_id=_END, decoder_start_token_id=0, forced_eos_token_id=None, max_position_embeddings=64,
    ),
}  # fmt: skip


def saved(kind: str, path: Path) -> str:
    torch.manual_seed(1)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS[kind], dtype=torch.float32)
    model.generation_config.update(
        eos_token_id=_END, pad_token_id=0, decoder_start_token_id=0, max_length=12
    )
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[str, dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("models")

    @functools.cache
    def of(kind: str) -> tuple[str, dict[str, Any]]:
        path = saved(kind, directory / kind)
        return path, run(path, str(directory / "out"), None)

    return of


PP2 = {"pp_size": 2, "num_microbatches": 2}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("t5", PP2),
        pytest.param("bart", {"dp_shard_size": 2}, marks=SLOW),
        *(pytest.param(kind, {"tp_size": 2}, marks=SLOW) for kind in CONFIGS),
        *(pytest.param(kind, {"dp_replicate_size": 2}, marks=SLOW) for kind in CONFIGS),
        *(pytest.param(kind, {**PP2, "tp_size": 2}, marks=SLOW) for kind in CONFIGS),
        *(
            pytest.param(kind, {**PP2, "num_microbatches": 1, "dp_shard_size": 2}, marks=SLOW)
            for kind in CONFIGS
        ),
        pytest.param("bart", PP2, marks=SLOW),
        pytest.param("t5", {"dp_shard_size": 2}, marks=SLOW),
    ],
)
def test_tokens_and_metrics_are_those_of_one_process(
    pools: Pools, expected: Any, kind: str, layout: Layout, tmp_path: Path
) -> None:
    path, stock = expected(kind)
    assert len({tuple(ids) for ids in stock["ids"]}) > 1  # or the test could not tell
    for found in pools(ParallelConfig(**layout).total_size).run(run, path, str(tmp_path), layout):
        assert found["ids"] == stock["ids"]
        assert found["labels"] == stock["labels"]
        for ours, theirs in zip(found["logs"], stock["logs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


def refusal(path: str, out: str) -> str:
    with pytest.raises(ConfigError) as caught:
        trainer_of(path, out, PP2, hfscale.Trainer)
    return str(caught.value)


def test_a_trainer_that_does_not_generate_is_refused(
    pools: Pools, expected: Any, tmp_path: Path
) -> None:
    for message in pools(2).run(refusal, expected("t5")[0], str(tmp_path)):
        assert "use hfscale.Seq2SeqTrainer" in message
