#!/usr/bin/env bash
# A small vision-language model on two tensor ranks: pictures are drawn, the model learns to describe them, and is then
# fine-tuned to answer questions: frozen tower, trained projector, LoRA on its model of text. Checked with hfscale out of
# reach. Arguments are recipe overrides for the fine-tuning, as for QLoRA:
#   scripts/demo_vision.sh quantization.load_in_4bit=true quantization.bnb_4bit_quant_type=nf4 merge=float32 \
#       'quantization.llm_int8_skip_modules=[model.vision_tower,model.multi_modal_projector,lm_head]'
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-.venv/bin/python}"
PROCESSES="${PROCESSES:-2}"
RUN="${RUN:-demo-vision}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"
LAUNCH=("$PYTHON" -m accelerate.commands.launch --multi_gpu --num_machines 1 --mixed_precision no --dynamo_backend no
        --main_process_port 0 --num_processes "$PROCESSES")
SECONDS=0

if [ ! -f runs/demo-vision-base/checkpoint/config.json ]; then
    echo "== draw pictures"
    "$PYTHON" scripts/make_pictures.py runs/demo-vision-data
    echo "== learn to describe them (once)"
    "${LAUNCH[@]}" scripts/finetune.py --config scripts/recipes/demo_vision_captions.yaml replace=true
fi
echo "== fine-tune on questions"
"${LAUNCH[@]}" scripts/finetune.py --config scripts/recipes/demo_vision.yaml name="$RUN" replace=true "$@"
echo "== check, without hfscale"
"$PYTHON" scripts/check_checkpoint.py "runs/$RUN"
echo "== summary (${SECONDS} s)"
"$PYTHON" scripts/summary.py "runs/$RUN"
