#!/usr/bin/env bash
# PEFT 0.21.2: `convert_to_lora` of a DoRA adapter leaves its magnitudes out, at any rank.
# Expected: at full rank the converted LoRA computes what the adapter computes, as it does for plain LoRA; or the
# conversion is refused, since every module is asked whether it "supports" one.
# Seen: DoRA's modules answer yes, and only the product of the two factors is converted. The norms of the weight's rows,
# which DoRA trains, are lost: the logits are wrong by half of the adapter's effect. The one warning says that a LoRA
# adapter typically needs no conversion. `merge_and_unload` of the same model is right.
# Read in `LoraVariant.supports_lora_conversion`, which is true unless a variant overrides it (KaSA does), and in
# `get_delta_weight`, which knows no variant; run with torch 2.14.1, transformers 5.24.0, on a CPU.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
"$place/venv/bin/python" - <<'PYTHON'
import copy
import sys

import torch
from peft import LoraConfig, convert_to_lora, get_peft_model, set_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH = 16
torch.manual_seed(0)
sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "vocab_size": 32}
config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, initializer_range=0.3, **sizes)
base = LlamaForCausalLM(config).double().eval()
ids = torch.arange(8).view(1, 8)


@torch.no_grad()
def logits(model):
    return model(input_ids=ids).logits


def errors(dora):
    """Return the errors of the converted and of the merged adapter, relative to the adapter's effect."""
    asked = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=dora)
    model = get_peft_model(copy.deepcopy(base), asked).double().eval()
    for name, parameter in model.named_parameters():
        if "lora" in name:  # as training would change them
            parameter.data += 0.3 * torch.randn_like(parameter)
    expected = logits(model)
    effect = (expected - logits(base)).abs().max()
    converted_config, weights = convert_to_lora(model, rank=WIDTH)
    converted = get_peft_model(copy.deepcopy(base), converted_config).double().eval()
    set_peft_model_state_dict(converted, weights)
    merged = model.merge_and_unload()
    return [float((logits(each) - expected).abs().max() / effect) for each in (converted, merged)]


found = {name: errors(dora) for name, dora in (("LoRA", False), ("DoRA", True))}
for name, (converted, merged) in found.items():
    print(f"{name}: converted at full rank {converted:.1e}, merged {merged:.1e} of the adapter's effect")
right = max(*found["LoRA"], found["DoRA"][1]) < 1e-5
sys.exit(0 if right and found["DoRA"][0] > 0.1 else 1)
PYTHON
