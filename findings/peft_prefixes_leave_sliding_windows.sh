#!/usr/bin/env bash
# Prefix tuning of a model whose attention has a sliding window (Mistral, Gemma 2 and 3, Qwen 2 ...): PEFT 0.21.2 with
# transformers 5.24.0, eager and SDPA attention alike.
# Expected: every token reads the prefix, in every layer, as prefix tuning is defined (Li and Liang 2021), since the
# prefix belongs to the layer and not to the text; or PEFT says that far tokens do not.
# Seen: without a word, a layer with a window of w tokens counts the virtual tokens as the oldest ones of the text. Only
# the first w - 1 tokens read any of them (7 of 24 with w = 8); all further tokens compute what they compute without a
# prefix. In Gemma 3 five of six layers have a window. A model without windows (Llama) reads the prefix everywhere. Seen
# by comparing the logits of one layer before and after the prefix's values change.
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
from peft import PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config

warnings.simplefilter("ignore")
WINDOW, VIRTUAL, TOKENS = 8, 4, 24
SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
}
CASES = {
    "Llama, eager": (LlamaConfig(**SIZES), "eager"),
    "Mistral, eager": (MistralConfig(**SIZES, sliding_window=WINDOW), "eager"),
    "Mistral, sdpa": (MistralConfig(**SIZES, sliding_window=WINDOW), "sdpa"),
    "Gemma 2, eager": (Gemma2Config(**SIZES, head_dim=8, sliding_window=WINDOW), "eager"),
    "Qwen 2, sdpa": (
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0),
        "sdpa",
    ),
}
readers = {}
for name, (config, attention) in CASES.items():
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)).eval()
    ids = torch.randint(3, 60, (1, TOKENS))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for parameter in model.prompt_encoder.parameters():
            parameter.add_(torch.randn_like(parameter))
        changed = ((model(input_ids=ids).logits - before).abs().amax(-1)[0] > 1e-5).tolist()
    readers[name] = sum(changed)
    print(f"{name}: {''.join('x' if each else '.' for each in changed)} {readers[name]} of {TOKENS} tokens read it")
expected = {name: TOKENS if name.startswith("Llama") else WINDOW - 1 for name in CASES}
sys.exit(readers != expected)
PYTHON
