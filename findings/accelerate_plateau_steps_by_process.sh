#!/bin/sh
# One would expect: a ReduceLROnPlateau that accelerate has prepared looks at each metric once, over any number of
# processes, so that a metric that improves each time leaves the rate alone.
# What happens: schedule.step(metric) calls the schedule num_processes times with the same metric. Each repeat is no
# improvement on the first, so with two processes and patience=0 the rate is halved at every step; in general a
# patience counts num_processes - 1 bad steps for each good one.
# Versions: torch 2.13.0, accelerate 1.15.0; CPU, two processes over gloo.
# Seen: rates after metrics 3, 2, 1, 0.5 in one process (1, 1, 1, 1) and in two (0.5, 0.25, 0.125, 0.0625).
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.13.0 accelerate==1.15.0
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import sys

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import ReduceLROnPlateau

METRICS = [3.0, 2.0, 1.0, 0.5]  # each is better than the one before
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
rates = []
for metric in METRICS:
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    schedule.step(metric)
    optimizer.zero_grad()
    rates.append(optimizer.param_groups[0]["lr"])
if accelerator.is_main_process:
    print(accelerator.num_processes, "process(es), metrics", METRICS, "rates", rates)
expected = [1.0] * 4 if accelerator.num_processes == 1 else [0.5, 0.25, 0.125, 0.0625]
accelerator.end_training()
sys.exit(0 if rates == expected else 1)
END
"$python" "$work/script.py"
"$python" -m torch.distributed.run --nproc-per-node 2 "$work/script.py"
