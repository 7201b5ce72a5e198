#!/usr/bin/env bash
# The demo's pretrained model, trained further twice on the same tokens: as it is, and as a mixture of experts.
# One process. Arguments are recipe overrides for both trainings: scripts/demo_upcycle.sh training.steps=20
# UPCYCLE are options of scripts/upcycle.py; results go to runs/$RUN-dense and runs/$RUN.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
RUN="${RUN:-demo-upcycle}"
BASE="${BASE:-demo-llama-stdlib-base}"
read -ra UPCYCLE <<< "${UPCYCLE:---num-experts 8 --top-k 2}"
RECIPE=scripts/recipes/demo_upcycle.yaml
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"
SECONDS=0

if [ ! -f "runs/$BASE/checkpoint/config.json" ]; then
    echo "== pretrain (once; make demo does it too)"
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$PYTHON" -m accelerate.commands.launch --multi_gpu --num_processes 2 \
        --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0 \
        scripts/pretrain.py --config scripts/recipes/demo_pretrain.yaml name="$BASE" replace=true
fi
echo "== upcycle"
"$PYTHON" scripts/upcycle.py "runs/$BASE/checkpoint" "runs/$RUN-start" "${UPCYCLE[@]}"
echo "== go on dense"
"$PYTHON" scripts/finetune.py --config "$RECIPE" name="$RUN-dense" replace=true base="runs/$BASE/checkpoint" "$@"
echo "== go on as a mixture of experts"
"$PYTHON" scripts/finetune.py --config "$RECIPE" name="$RUN" replace=true base="runs/$RUN-start" "$@"
echo "== check, without hfscale"
"$PYTHON" scripts/check_checkpoint.py "runs/$RUN"
echo "== compare (${SECONDS} s)"
"$PYTHON" scripts/compare_runs.py "runs/$RUN-dense" "runs/$RUN" --out "runs/$RUN/beside-dense.png"
