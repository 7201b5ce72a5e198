"""A training script as people write it, with transformers' Trainer or hfscale's; what both log is compared."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

import hfscale
from hfscale import ParallelConfig

_TIMES = ("runtime", "per_second", "preparation_time", "mem_")


class Rows(Dataset):
    """Rows of different lengths; some of their tokens are no labels."""

    def __init__(self, count: int, seed: int, vocabulary: int = 67, longest: int = 12) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, longest, (count,), generator=generator).tolist()
        self.ids = [
            torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths
        ]
        self.masked = [
            int(torch.randint(0, length - 2, (1,), generator=generator)) for length in lengths
        ]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: self.masked[index]] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in rows], batch_first=True, padding_value=0)
    mask = pad([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
    labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[:, :-1]
    labels = prediction.label_ids[:, 1:]
    valid = labels != -100
    return {
        "accuracy": float((logits.argmax(-1) == labels)[valid].mean()),
        "size": float(np.abs(logits[valid]).mean()),
        "rows": float(len(logits)),
    }


class Calls(TrainerCallback):
    """Who is called, and how often."""

    def __init__(self) -> None:
        self.steps = self.logs = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1

    def on_log(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.logs += state.is_world_process_zero


@dataclass
class Case:
    """What a script is asked for.

    Attributes:
        arguments: of ``TrainingArguments``; ``batch`` is the number of rows of all distinct batches of a forward pass.
        load: of ``from_pretrained``.
        metrics: whether ``compute_metrics`` looks at logits.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    metrics: bool = True
    rows: int = 22
    evaluated: int = 10
    batch: int = 4
    lora: Any = None
    dropout: float = 0.0
    resume: str | None = None
    kind: str = "plain"


class OwnLoss:
    """A subclass's: every row counts alike, however long it is."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs["labels"][:, 1:]
        output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = output.logits[:, :-1].transpose(1, 2)
        entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = (entropy / (labels != -100).sum(-1, keepdim=True)).sum() / len(labels)
        return (loss, output) if return_outputs else loss


def arguments(case: Case, out: str, world: int) -> TrainingArguments:
    given: dict[str, Any] = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "include_num_input_tokens_seen": "non_padding",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **case.arguments,
    }
    return TrainingArguments(
        out,
        per_device_train_batch_size=case.batch // world,
        per_device_eval_batch_size=case.batch // world,
        **given,
    )


def build(case: Case, path: str, layout: dict[str, Any] | None) -> Any:
    load = {"dtype": torch.float32, "attention_dropout": case.dropout, **case.load}
    if layout is not None:
        load = {"mixed_precision": "bf16" if case.arguments.get("bf16") else "no", **load}
        return hfscale.from_pretrained(
            path, parallel=ParallelConfig(**layout), peft_config=case.lora, **load
        )
    model = AutoModelForCausalLM.from_pretrained(path, **load)
    for module in model.modules():
        # A layout that some processors have for evaluation.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return (
        model
        if case.lora is None
        else peft.PeftModel.from_pretrained(model, case.lora, is_trainable=True)
    )


def run(
    case: Case, path: str, out: str, layout: dict[str, Any] | None, processes: int = 1
) -> dict[str, Any]:
    """Train; stock where there is no layout, in so many ``processes``."""
    world = processes if layout is None else ParallelConfig(**layout).batch_world
    model = build(case, path, layout)
    calls = Calls()
    stock: Any = transformers.Trainer if layout is None else hfscale.Trainer
    kind = type("OwnTrainer", (OwnLoss, stock), {}) if case.kind == "own" else stock
    trainer = kind(
        model=model,
        args=arguments(case, out, world),
        data_collator=collate,
        train_dataset=Rows(case.rows, 1),
        eval_dataset=Rows(case.evaluated, 2),
        compute_metrics=accuracy if case.metrics else None,
        callbacks=[calls],
    )
    trainer.train(resume_from_checkpoint=case.resume)
    trainer.save_model(str(Path(out) / "final"))
    return {
        "history": [_without_times(row) for row in trainer.state.log_history],
        "calls": (calls.steps, calls.logs),
        "writer": trainer.is_world_process_zero(),
        "best": trainer.state.best_model_checkpoint,
    }


def _without_times(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not any(part in name for part in _TIMES)}


def assert_equal(
    found: dict[str, Any], expected: dict[str, Any], layout: dict[str, Any], tolerance: float = 1e-5
) -> None:
    """Every number of every logged row.

    Trainer counts operations on padding too, and data ranks pad their rows to lengths of their own.
    """
    left_out = {"total_flos"} if ParallelConfig(**layout).batch_world > 1 else set()
    assert len(found["history"]) == len(expected["history"])
    for ours, theirs in zip(found["history"], expected["history"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs.keys() - left_out:
            value = theirs[name]
            apart = abs(ours[name] - value)
            assert apart <= tolerance * max(1.0, abs(value)), (
                theirs["step"],
                name,
                ours[name],
                value,
            )
    assert found["calls"][0] == expected["calls"][0]
    assert found["calls"][1] == (expected["calls"][1] if found["writer"] else 0)
