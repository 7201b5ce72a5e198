#!/usr/bin/env bash
# Generation by a prefix-tuned model: PEFT 0.21.2 with transformers 5.24.0, the newest releases of both together.
# Expected: generate continues behind the prefix, as one forward pass after the other does, and as with transformers
# 5.23.0; or it says that it cannot.
# Seen: generate gives what the model gives without any prefix, every token of it. PEFT passes the prefix as
# `past_key_values`, transformers 5.24 an empty cache as `cache`, which is the one that counts: "Both `past_key_values`
# and `cache` are set", a FutureWarning. With prompt tuning the first token alone is right, since PEFT does not
# recognize a filled cache by its new name, and puts the prompt in front of every later token again.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
"$place/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore", UserWarning)
prompt = torch.tensor([[5, 6, 7, 8]])
given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
right = []
for kind in (PrefixTuningConfig, PromptTuningConfig):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, initializer_range=0.5,
    )
    base = LlamaForCausalLM(config).eval()
    without = base.generate(**given)[0, 4:].tolist()
    model = get_peft_model(base, kind(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    ids = prompt
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 20)
        for _ in range(6):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        generated = model.generate(**given)[0, 4:].tolist()
    expected = ids[0, 4:].tolist()
    print(f"{kind.__name__}: generate {generated}, by forward passes {expected}, without {without}")
    right.append(generated == expected)
sys.exit(any(right))
PYTHON
