#!/bin/sh
# One would expect: GradientAccumulationPlugin(adjust_scheduler=True), which is its default, counts the batches that are
# accumulated as steps of a prepared schedule, as its documentation says.
# What happens: Accelerator passes on only those fields of the plugin that differ from their defaults, and what reads
# them takes a missing adjust_scheduler for False. So it is off for True, for the default and for False: after 8 batches
# in steps of 4 a schedule with a total_steps counts 2 steps and no more.
# Versions: torch 2.14.1, accelerate 1.15.0; CPU, one process.
# Seen: what the accelerator's gradient_state says for each value of the plugin's field, and the schedule's own count.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.14.1 accelerate==1.15.0
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

given = sys.argv[1]
fields = {} if given == "default" else {"adjust_scheduler": given == "True"}
plugin = GradientAccumulationPlugin(num_steps=4, **fields)
accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
for _ in range(8):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
found = accelerator.gradient_state.adjust_scheduler
counted = schedule.state_dict()["_step_count"] - 1
print(f"given: {given:8} plugin: {plugin.adjust_scheduler!s:5} in use: {found!s:5} steps counted: {counted}")
raise SystemExit(0 if not found and counted == 2 else 1)
END
for given in default True False; do
    "$python" "$work/script.py" "$given"
done
