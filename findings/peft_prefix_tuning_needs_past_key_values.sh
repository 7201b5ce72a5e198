#!/usr/bin/env bash
# Prefix tuning of a sequence classifier: PEFT 0.21.2 with transformers 5.24.0, the newest releases of both together.
# Expected: it trains, as with transformers 5.23.0, since 5.24 renames the argument `past_key_values` to `cache` and
# still takes the old name, with a warning, until 5.40.
# Seen: ValueError "Model does not support past key values which are required for prefix tuning." PEFT looks for the
# name in the signature of forward, where transformers' decorator shows the new one alone. A causal model trains, with
# a FutureWarning, since PEFT passes the argument there without a look.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
"$place/venv/bin/python" - <<'PYTHON'
import sys

import torch
from peft import PrefixTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

ids = torch.tensor([[5, 6, 7, 8]])
cases = {"CAUSAL_LM": (LlamaForCausalLM, ids), "SEQ_CLS": (LlamaForSequenceClassification, torch.tensor([1]))}
seen = {}
for task, (kind, labels) in cases.items():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model = get_peft_model(kind(config), PrefixTuningConfig(task_type=task, num_virtual_tokens=3))
    try:
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        seen[task] = f"loss {loss.item():.3f}"
    except ValueError as error:
        seen[task] = str(error)
    print(kind.__name__, seen[task])
sys.exit(not (seen["CAUSAL_LM"].startswith("loss") and "does not support past key values" in seen["SEQ_CLS"]))
PYTHON
