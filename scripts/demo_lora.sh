#!/usr/bin/env bash
# LoRA over the demo's pretrained model on two tensor ranks: trained, saved for PEFT, merged, and both checked with hfscale
# out of reach. Arguments are recipe overrides for the training: scripts/demo_lora.sh training.steps=20
# RECIPE names one in scripts/recipes (demo_lora, demo_qlora, demo_8bit, demo_reward); results go to runs/$RUN. The base is trained first
# where it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
PROCESSES="${PROCESSES:-2}"
RECIPE="${RECIPE:-demo_lora}"
RUN="${RUN:-${RECIPE//_/-}}"
BASE="${BASE:-demo-llama-stdlib-base}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"
LAUNCH=("$PYTHON" -m accelerate.commands.launch --multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no
        --main_process_port 0)
SECONDS=0

if [ ! -f "runs/$BASE/checkpoint/config.json" ]; then
    echo "== pretrain (once; make demo does it too)"
    "${LAUNCH[@]}" --num_processes 2 scripts/pretrain.py --config scripts/recipes/demo_pretrain.yaml name="$BASE" replace=true
fi
echo "== fine-tune"
"${LAUNCH[@]}" --num_processes "$PROCESSES" scripts/finetune.py --config "scripts/recipes/$RECIPE.yaml" name="$RUN" replace=true \
    base="runs/$BASE/checkpoint" "$@"
echo "== check, without hfscale"
"$PYTHON" scripts/check_checkpoint.py "runs/$RUN"
echo "== summary (${SECONDS} s)"
"$PYTHON" scripts/summary.py "runs/$RUN"
