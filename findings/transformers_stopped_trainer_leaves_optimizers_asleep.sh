#!/bin/sh
# One would expect: a Trainer that a callback stops ends, and a loop with an Accelerator of its own that runs afterwards
# in the same process (a notebook, a search) trains.
# What happens: if the Trainer is stopped within an accumulation of gradients (on_substep_end), Accelerate's process-wide
# `sync_gradients` stays False. Every optimizer and schedule that any later Accelerator prepares does nothing in step(),
# without an error, as long as the loop does not use accelerator.accumulate(): losses stay as they are. A new
# Accelerator() does not reset the flag; another Trainer does, as it trains.
# Versions: transformers 5.24.0, accelerate 1.15.0, torch 2.14.1; CPU, one process.
# Seen: tests that failed only after another one had stopped a Trainer within a step.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 accelerate==1.15.0
fi
cat > "$work/script.py" <<'END'
import sys

import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean()}


class Stop(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def moves():
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = accelerator.unwrap_model(model).weight.detach().clone()
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return not torch.equal(before, accelerator.unwrap_model(model).weight)


rows = [{"x": torch.ones(1), "labels": torch.zeros(1)} for _ in range(8)]
arguments = {"output_dir": sys.argv[1], "gradient_accumulation_steps": 2, "report_to": "none"}
arguments |= {"per_device_train_batch_size": 1, "disable_tqdm": True, "save_strategy": "no"}


def train(*callbacks):
    asked = TrainingArguments(**arguments, num_train_epochs=1)
    Trainer(model=Model(), args=asked, train_dataset=rows, callbacks=list(callbacks)).train()


first = moves()
train()
whole = moves()
train(Stop)
stopped = moves()
train()
again = moves()
print("a loop's weights move, before any Trainer:", first)
print("... behind a Trainer that has ended:", whole)
print("... behind one that was stopped within an accumulation:", stopped)
print("... behind another one that has ended:", again)
assert (first, whole, stopped, again) == (True, True, False, True)
print("as seen")
END
"$python" "$work/script.py" "$work/out" 2>&1
