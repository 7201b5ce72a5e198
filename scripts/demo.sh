#!/usr/bin/env bash
# The whole way on two CPU processes: pretrain, fine-tune, and load the result with hfscale out of reach.
# Arguments are recipe overrides for both trainings: scripts/demo.sh training.steps=20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"
# Two ranks, over gloo where there are no GPUs. Port 0: any free one. The rest are Accelerate's defaults, said aloud.
LAUNCH=("$PYTHON" -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no
        --dynamo_backend no --main_process_port 0)
SECONDS=0

echo "== pretrain"
"${LAUNCH[@]}" scripts/pretrain.py --config scripts/recipes/demo_pretrain.yaml "$@"
echo "== fine-tune"
"${LAUNCH[@]}" scripts/finetune.py --config scripts/recipes/demo_finetune.yaml "$@"
echo "== check, without hfscale"
"$PYTHON" scripts/check_checkpoint.py runs/demo-llama-stdlib
echo "== summary (${SECONDS} s)"
"$PYTHON" scripts/summary.py runs/demo-llama-stdlib-base runs/demo-llama-stdlib
