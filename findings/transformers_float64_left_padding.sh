#!/usr/bin/env bash
# LlamaForCausalLM of transformers 5.24.0, eager attention, float64, a batch padded on the left; CPUs, 2026-11-29.
# Expected: float64 is the careful way to compute what float32 computes, so a loss that is finite in float32 is in float64.
# Seen: the loss is NaN, and so is every logit of the padded row. The mask adds the lowest float64 to scores, eager attention
# takes their softmax in float32, where that is minus infinity, and a row that is masked whole (padding has no token before
# it) has no softmax; its NaN comes back through the values of the next layer, since zero times NaN is NaN. float32, bfloat16
# and "sdpa" in float64 are finite. Met while gradients were compared in float64.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 transformers==5.24.0
"$place/venv/bin/python" - <<'PYTHON'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ids = torch.arange(3, 15).view(2, 6)
mask = torch.ones_like(ids)
mask[1, :3] = 0
labels = ids.masked_fill(mask == 0, -100)
finite = {}
for attention in ("eager", "sdpa"):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            attn_implementation=attention,
        )
        model = LlamaForCausalLM(config).to(dtype)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        finite[attention, dtype] = bool(loss.isfinite())
        print(f"{attention}, {dtype}: loss {loss.item():.4f}")
wrong = [case for case, good in finite.items() if not good]
sys.exit(wrong != [("eager", torch.float64)])
PYTHON
