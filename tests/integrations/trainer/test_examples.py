"""Scripts after transformers' run_clm, run_glue and run_translation log, in a layout, what they log in one process."""

import math
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    T5Config,
    default_data_collator,
    set_seed,
)

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
AUTO = {
    "clm": AutoModelForCausalLM,
    "glue": AutoModelForSequenceClassification,
    "translation": AutoModelForSeq2SeqLM,
}
TIMES = ("runtime", "per_second", "flos")


def config(name: str) -> Any:
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if name == "glue":
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertConfig(vocab_size=67, num_labels=3, max_position_embeddings=32, **small, **still)
    if name == "translation":
        sizes = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}
        return T5Config(
            vocab_size=67, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, **sizes
        )
    return tiny("llama")


def rows(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 67, (count, 10), generator=generator)
    made = []
    for row in ids.tolist():
        # Padded to the longest, as --pad_to_max_length.
        kept = 10 if name == "clm" else 5 + row[0] % 6
        padded = {
            "input_ids": row[:kept] + [0] * (10 - kept),
            "attention_mask": [1] * kept + [0] * (10 - kept),
        }
        labels: Any = row if name == "clm" else row[0] % 3
        if name == "translation":
            labels = [*row[: kept - 3], *[-100] * (10 - kept)]
        made.append({**padded, "labels": labels})
    return made


def metrics(name: str, prediction: Any) -> dict[str, float]:
    found = prediction.predictions
    labels = prediction.label_ids
    if isinstance(found, tuple):
        found = found[0]
    if name == "glue":
        right = np.argmax(found, axis=1) == labels
        return {
            "accuracy": float(right.mean()),
            "combined_score": float(np.abs(found).mean() + right.sum()),
        }
    if name == "clm":  # after preprocess_logits_for_metrics
        return {"accuracy": float((found[:, :-1] == labels[:, 1:]).mean())}
    lengths = (found != 0).sum(-1)
    return {
        "gen_len": float(lengths.mean()),
        "score": float((found * np.arange(found.shape[1])).mean()),
    }


def script(name: str, path: str, out: str, layout: dict[str, int] | None) -> list[dict[str, float]]:
    """What is logged, what ``train``, ``evaluate`` and ``predict`` return, and what was predicted."""
    ours = layout is not None
    world = ParallelConfig(**(layout or {})).batch_world
    arguments: Any = (
        transformers.Seq2SeqTrainingArguments
        if name == "translation"
        else transformers.TrainingArguments
    )
    trainer_of: Any = transformers.Seq2SeqTrainer if name == "translation" else transformers.Trainer
    generates = (
        {"predict_with_generate": True, "generation_max_length": 8} if name == "translation" else {}
    )
    args = arguments(
        out, num_train_epochs=2, per_device_train_batch_size=4 // world, per_device_eval_batch_size=4 // world,
        learning_rate=5e-3, warmup_steps=2, logging_steps=1, eval_strategy="epoch", save_strategy="no", seed=7,
        report_to=[], disable_tqdm=True, use_cpu=True, **generates,
    )  # fmt: skip
    set_seed(args.seed)
    load: Any = {"parallel": ParallelConfig(**layout), "auto_class": AUTO[name]} if ours else {}
    model = (hfscale if ours else AUTO[name]).from_pretrained(path, dtype=torch.float32, **load)
    trainer = (type("Own", (hfscale.TrainerMixin, trainer_of), {}) if ours else trainer_of)(
        model=model,
        args=args,
        train_dataset=rows(name, 22, 1),
        eval_dataset=rows(name, 10, 2),
        data_collator=default_data_collator,
        compute_metrics=lambda prediction: metrics(name, prediction),
        preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1))
        if name == "clm"
        else None,
    )
    found = [trainer.train().metrics]
    trainer.save_model()
    trainer.save_metrics("train", found[0])
    trainer.save_state()
    found.append(trainer.evaluate(metric_key_prefix="eval"))
    found[-1]["perplexity"] = math.exp(found[-1]["eval_loss"])
    predicted = trainer.predict(rows(name, 6, 3), metric_key_prefix="predict")
    found.append({**predicted.metrics, "sum": float(np.abs(predicted.predictions[0]).sum())})
    return [
        {key: value for key, value in row.items() if not any(part in key for part in TIMES)}
        for row in (*found, *trainer.state.log_history)
    ]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    def start(name: str) -> str:
        torch.manual_seed(0)
        made = tmp_path_factory.mktemp(name)
        AUTO[name].from_config(config(name), dtype=torch.float32).save_pretrained(made)
        return str(made)

    return start


EVERY = [
    *product(("clm", "glue"), ("tp_size", "pp_size", "dp_shard_size")),
    ("translation", "tp_size"),
]


@pytest.mark.daily("glue-pp_size")
@pytest.mark.parametrize(("name", "axis"), EVERY)
def test_logs_equal_one_process(
    pools: Pools, starts: Callable[[str], str], name: str, axis: str, tmp_path: Path
) -> None:
    path = starts(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = script(name, path, str(tmp_path / "stock"), None)
    for found in pools(2).run(script, name, path, str(tmp_path / "own"), {axis: 2}):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5)
