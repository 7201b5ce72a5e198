#!/usr/bin/env bash
# Trainer of transformers 5.24.0 with PEFT 0.21.2, a model of two adapters, load_best_model_at_end; CPUs, 2026-11-29.
# Expected: the adapter that was trained ends with its weights of the best step.
# Seen: a checkpoint has "default" at its top and every other adapter in a directory of its name; the best model is read from
# the top into the adapter that is active. With adapters "default" and "b", b active, b ends with default's weights, and
# nothing is said (shapes that differ raise). With adapters "a" and "b" there is nothing at the top: b keeps its last
# weights, with a warning about several nodes.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
"$place/venv/bin/python" - "$place/runs" <<'PYTHON'
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

ROWS = [{"input_ids": list(range(i, i + 4)), "labels": list(range(i, i + 4))} for i in range(3, 11)]


def weights(model: torch.nn.Module, adapter: str) -> list[torch.Tensor]:
    named = model.named_parameters()
    return [value.detach().clone() for name, value in named if f".{adapter}." in name]


class FirstIsBest(Trainer):
    seen: list[list[torch.Tensor]]

    def evaluate(self, *args: object, **kwargs: object) -> dict[str, float]:
        metrics = {"eval_loss": float(len(self.seen))}
        self.seen.append(weights(self.model, "b"))
        self.log(metrics)
        return metrics


def trained(first: str, directory: Path) -> dict[str, bool]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    lora = {"r": 2, "target_modules": ["q_proj"]}
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(**lora), adapter_name=first)
    model.add_adapter("b", LoraConfig(**lora))
    model.set_adapter("b")
    arguments = TrainingArguments(
        str(directory),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = FirstIsBest(model, arguments, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.seen = []
    trainer.train()
    ends = weights(model, "b")
    others = {
        "the best step's": trainer.seen[0],
        "the last step's": trainer.seen[1],
        f"those of {first}": weights(model, first),
    }
    return {words: all(map(torch.equal, ends, other)) for words, other in others.items()}


found = {first: trained(first, Path(sys.argv[1], first)) for first in ("default", "a")}
for first, equal in found.items():
    held = [words for words, same in equal.items() if same]
    print(f"adapters {first} and b, b trained: its weights at the end are {', '.join(held)}")
wanted = {"default": [False, False, True], "a": [False, True, False]}
sys.exit({first: list(equal.values()) for first, equal in found.items()} != wanted)
PYTHON
