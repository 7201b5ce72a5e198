#!/usr/bin/env bash
# model.add_adapter of transformers 5.24.0 with PEFT 0.21.2, the newest releases of both on 2026-11-28.
# Expected: a LoRA is added, as with transformers 5.23.0.
# Seen: ValueError "The version of PEFT you are using is not compatible, please use a version >= 0.22.0", which is not
# released. The methods beside it (load_adapter, set_adapter, ...) ask the same. get_peft_model still works.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
"$place/venv/bin/python" - <<'PYTHON'
import sys

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
lora = LoraConfig(r=2, target_modules=["q_proj"])
try:
    LlamaForCausalLM(config).add_adapter(lora)
    seen = "added"
except ValueError as error:
    seen = str(error)
print("add_adapter:", seen)
print("get_peft_model:", type(get_peft_model(LlamaForCausalLM(config), lora)).__name__)
sys.exit(not seen.endswith(">= 0.22.0"))
PYTHON
