#!/usr/bin/env bash
# Reinforcement learning on CPU processes: two tensor ranks generate and learn together, and the reward is plotted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"
SECONDS=0

echo "== learn from a reward: the share of vowels in what the model writes"
"$PYTHON" -m accelerate.commands.launch --config_file scripts/examples/two_processes.yaml scripts/examples/grpo.py
echo "== plot (${SECONDS} s)"
"$PYTHON" scripts/plot_log.py runs/examples/grpo/trainer_state.json reward
