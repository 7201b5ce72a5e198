#!/bin/sh
# One would expect: an optimizer of bitsandbytes has the states that it was asked for, whatever was trained before it
# in the same process.
# What happens: GlobalOptimManager keeps overrides also by place, (group, index), for the rest of the process. A Trainer
# with an 8-bit optimizer overrides its embeddings (32 bits); from then on every other optimizer of bitsandbytes takes
# 32-bit states for whatever parameter stands at the same place, here the only weight of a Linear.
# Versions: torch 2.13.0, bitsandbytes 0.50.2, accelerate 1.15.0, transformers 5.23.0; CPU.
# Seen: dtype of state1 after one step of AdamW8bit on the same layer, before and after a one-step Trainer run.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.13.0 bitsandbytes==0.50.2 accelerate==1.15.0 transformers==5.23.0
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import tempfile

import bitsandbytes
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def states():
    """Train one step of a Linear by bitsandbytes' own AdamW8bit; return the dtype of its first state."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, bias=False)
    optimizer = bitsandbytes.optim.AdamW8bit(layer.parameters(), lr=1e-3)
    layer(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    return optimizer.state[layer.weight]["state1"].dtype


before = states()
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
)
rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 4
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, optim="adamw_8bit", max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()
after = states()
kept = bitsandbytes.optim.GlobalOptimManager.get_instance().index2config
print("states of AdamW8bit before a Trainer:", before)
print("states of AdamW8bit after it:        ", after)
print("overrides kept by place:             ", kept)
raise SystemExit(0 if (before, after) == (torch.uint8, torch.float32) else 1)
END
"$python" "$work/script.py"
