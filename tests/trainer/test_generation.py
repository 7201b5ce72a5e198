"""Tokens that a Trainer generates as it evaluates, in every layout: those of one process, and so the same metrics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, BartConfig, Seq2SeqTrainingArguments, T5Config

import hfscale
from hfscale import ParallelConfig
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
        return {"input_ids": text, "labels": torch.cat((text[: len(text) // 2].flip(0), torch.tensor([_END])))}


def metrics(prediction: Any) -> dict[str, float]:
    ids, labels = prediction.predictions, prediction.label_ids
    return {"rows": float(len(ids)), "sum": float((ids * (ids > 0)).sum()), "labels": float(labels.sum())}


def trainer_of(path: str, out: str, layout: Layout | None, kind: Any = None, **more: Any) -> Any:
    world, stock = 1, layout is None
    if stock:
        model = AutoModelForSeq2SeqLM.from_pretrained(path)
    else:
        parallel = ParallelConfig(**layout)
        world = parallel.batch_world
        model = hfscale.from_pretrained(path, parallel=parallel, auto_class=AutoModelForSeq2SeqLM)
    args = Seq2SeqTrainingArguments(
        out,
        predict_with_generate=True,
        generation_max_length=12,
        per_device_train_batch_size=4 // world,
        per_device_eval_batch_size=4 // world,
        max_steps=4,
        learning_rate=2e-2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )
    kind = kind or (transformers.Seq2SeqTrainer if stock else hfscale.Seq2SeqTrainer)
    rows = Pairs(9)
    return kind(
        model=model,
        args=args,
        processing_class=None,
        data_collator=collate,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=metrics,
    )


def run(path: str, out: str, layout: Layout | None) -> tuple[list[dict[str, float]], list[list[int]], list[float]]:
    torch.manual_seed(0)
    trainer = trainer_of(path, out, layout)
    before = trainer.predict(trainer.eval_dataset)  # before the first step
    trainer.train()
    after = trainer.predict(trainer.eval_dataset, num_beams=2, max_length=9)
    logs = [
        {k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k and "flos" not in k}
        for row in trainer.state.log_history
    ]
    return logs, [*before.predictions.tolist(), *after.predictions.tolist()], after.label_ids.tolist()


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
    model.generation_config.update(eos_token_id=_END, pad_token_id=0, decoder_start_token_id=0, max_length=12)
    model.save_pretrained(path)
    return str(path)
