#!/usr/bin/env bash
# The whole way on CPU processes: pretrain, fine-tune, and load the result with hfscale out of reach.
# Arguments are recipe overrides for both trainings: scripts/demo.sh training.steps=20
# PROCESSES are started, which the layout must need; results go to runs/$RUN-base and runs/$RUN. RECIPES names the pair
# of recipes: scripts/recipes/${RECIPES}_pretrain.yaml and ..._finetune.yaml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
PROCESSES="${PROCESSES:-2}"
RUN="${RUN:-demo-llama-stdlib}"
RECIPES="scripts/recipes/${RECIPES:-demo}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"
# Ranks over gloo where there are no GPUs. Port 0: any free one. The rest are Accelerate's defaults, said aloud.
LAUNCH=("$PYTHON" -m accelerate.commands.launch --multi_gpu --num_processes "$PROCESSES" --num_machines 1
        --mixed_precision no --dynamo_backend no --main_process_port 0)
SECONDS=0

echo "== pretrain"
"${LAUNCH[@]}" scripts/pretrain.py --config "${RECIPES}_pretrain.yaml" name="$RUN-base" replace=true "$@"
echo "== fine-tune"
"${LAUNCH[@]}" scripts/finetune.py --config "${RECIPES}_finetune.yaml" name="$RUN" replace=true \
    base="runs/$RUN-base/checkpoint" "$@"
echo "== check, without hfscale"
"$PYTHON" scripts/check_checkpoint.py "runs/$RUN"
echo "== summary (${SECONDS} s)"
"$PYTHON" scripts/summary.py "runs/$RUN-base" "runs/$RUN"
