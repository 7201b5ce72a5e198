#!/usr/bin/env bash
# Long sequences on CPU processes: train on 16,384 tokens at a time, cut over two ranks, check the checkpoint with plain
# transformers, and plot what a rank keeps against the length. Arguments are recipe overrides: training.steps=4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"
SECONDS=0

echo "== train on long sequences"
"$PYTHON" -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no \
    --dynamo_backend no --main_process_port 0 scripts/pretrain.py --config scripts/recipes/demo_long_pretrain.yaml \
    replace=true "$@"
echo "== check, without hfscale"
"$PYTHON" scripts/check_checkpoint.py runs/demo-long
echo "== memory by length"
"$PYTHON" scripts/long_memory.py --out runs/demo-long/memory.png
echo "== summary (${SECONDS} s)"
"$PYTHON" scripts/summary.py runs/demo-long
