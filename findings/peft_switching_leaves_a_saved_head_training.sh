#!/usr/bin/env bash
# PEFT 0.21.2: after a switch of adapters the head that the other adapter saved goes on training.
# Expected: `set_adapter("default")` freezes everything of the adapter "other": its factors, and its copy of the head
# (`modules_to_save`), which is not read any more.
# Seen: if "other" was loaded by `load_adapter(..., is_trainable=True)`, its factors are frozen and its copy of the head
# is not. `print_trainable_parameters` counts it, an optimizer that is made now holds it, and DistributedDataParallel
# stops in its second step, because a parameter that trains has got no gradient. Adapters made by `add_adapter` are
# frozen whole.
# Found by comparing `requires_grad` over random sequences of switches; run with torch 2.14.1, transformers 5.24.0, on a
# CPU.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
"$place/venv/bin/python" - "$place" <<'PYTHON'
import sys

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

place = sys.argv[1]
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


def config():
    return LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])


def switched(loaded):
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)), config())
    if loaded:
        model.save_pretrained(f"{place}/saved")
        model.load_adapter(f"{place}/saved", "other", is_trainable=True)
    else:
        model.add_adapter("other", config())
    model.set_adapter("default")
    return model


training = {}
for loaded in (False, True):
    named = switched(loaded).named_parameters()
    training[loaded] = [name for name, each in named if ".other." in name and each.requires_grad]
print("what trains of the inactive adapter, by whether it was loaded:", training)

distributed.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=0, world_size=1)
model = DistributedDataParallel(switched(loaded=True))
ids = torch.arange(8).view(1, 8)
said = ""
try:
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
except RuntimeError as error:
    said = str(error).splitlines()[0]
print("two steps of DistributedDataParallel:", said or "no error")
distributed.destroy_process_group()
alone = not training[False] and len(training[True]) == 1 and "lm_head" in training[True][0]
sys.exit(0 if alone and "finished reduction" in said else 1)
PYTHON
