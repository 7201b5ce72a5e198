#!/usr/bin/env bash
# What a layout changes, and what not: the same ten steps in one process and on two tensor ranks, beside each other.
# Arguments are recipe overrides for both.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"
for ranks in 1 2; do
    echo "== on $ranks rank(s)"
    "$PYTHON" -m hfscale train demo_pretrain name="demo-compare-$ranks" parallel.tp_size="$ranks" training.steps=10 \
        training.log_every=2 data.validation_sequences=16 "$@"
done
echo "== beside each other"
"$PYTHON" scripts/side_by_side.py runs/demo-compare-1 runs/demo-compare-2
