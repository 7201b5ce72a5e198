#!/usr/bin/env bash
# Trainable tokens of PEFT 0.21.2 around a head: its bias is left out.
# Expected: a fresh adapter, whose rows equal those of the weight, changes no logit.
# Seen: around a head with a bias (Phi's), logits lose the bias, in training and inference; once merged or disabled, it
# is back, so a merged model differs from what was trained. Nothing is said. LoRA's `trainable_token_indices` of a head,
# or of an embedding with a tied head that has a bias, do the same.
# Read in `TrainableTokensLayer.forward_adapters` (`F.linear(input=x, weight=W)`), and run with torch 2.13.0,
# transformers 5.23.0, on a CPU.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 peft==0.21.2
"$place/venv/bin/python" - <<'PYTHON'
import sys

import torch
from peft import TrainableTokensConfig, get_peft_model
from transformers import PhiConfig, PhiForCausalLM

torch.manual_seed(0)
config = PhiConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
)
model = PhiForCausalLM(config).eval()
torch.nn.init.normal_(model.lm_head.bias)
bias = model.lm_head.bias.detach().clone()
ids = torch.arange(8)[None]
with torch.no_grad():
    plain = model(input_ids=ids).logits
    adapted = get_peft_model(
        model, TrainableTokensConfig(token_indices=[1], target_modules=["lm_head"])
    ).eval()
    fresh = adapted(input_ids=ids).logits
    merged = adapted.merge_and_unload()(input_ids=ids).logits
lost = float((plain - fresh).abs().max())
of_bias = float((plain - fresh - bias).abs().max())
print("logits, plain - with a fresh adapter:", lost, "; minus the bias:", of_bias)
print("logits, plain - merged:", float((plain - merged).abs().max()))
sys.exit(0 if lost > 1 and of_bias < 1e-5 and torch.allclose(plain, merged) else 1)
PYTHON
