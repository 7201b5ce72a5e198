#!/usr/bin/env bash
# `ensure_weight_tying=True` of PEFT 0.21.2 beside `low_cpu_mem_usage=True`: the copies are not tied.
# Expected: the trained copies of an embedding and of its tied head are one parameter, as without `low_cpu_mem_usage`,
# which "is useful to speed up the loading process" and is no other adapter.
# Seen: two parameters, each trained alone. Nothing is said.
# Read in `ModulesToSaveWrapper.update`, whose new head gets the embedding's parameter, which the context of empty weights
# replaces; run with torch 2.13.0, transformers 5.23.0, on a CPU.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 peft==0.21.2
"$place/venv/bin/python" - <<'PYTHON'
import sys

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def copies(low):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    asked = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(LlamaForCausalLM(config), asked, low_cpu_mem_usage=low)
    named = adapted.named_parameters(remove_duplicate=False)
    return [parameter for name, parameter in named if "modules_to_save" in name]


tied = {low: len({id(each) for each in copies(low)}) == 1 for low in (False, True)}
print("one parameter, by low_cpu_mem_usage:", tied)
sys.exit(0 if tied == {False: True, True: False} else 1)
PYTHON
