#!/bin/sh
# One would expect: Llama4ForConditionalGeneration computes a loss of text without pictures, as its text class
# Llama4ForCausalLM does.
# What happens: a forward pass of text raises "'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'", with
# return_dict=False too.
# Versions: transformers 5.24.0, torch 2.14.1; CPU. The failing line is not in transformers 5.17.0 (read).
# Seen: random draws of classes, of which Llama 4's could not run in one process any more.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.14.1 transformers==5.24.0
fi
cat > "$work/script.py" <<'END'
import torch
from transformers import Llama4Config, Llama4ForCausalLM, Llama4ForConditionalGeneration

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "intermediate_size_mlp": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_local_experts": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
ids = torch.arange(1, 9)[None]
config = Llama4Config(text_config=TEXT, vision_config=VISION)
text = Llama4ForCausalLM(config.text_config)
print("the text class: loss", round(float(text(input_ids=ids, labels=ids).loss), 3))
whole = Llama4ForConditionalGeneration(config)
for options in ({}, {"return_dict": False}):
    try:
        whole(input_ids=ids, labels=ids, **options)
    except AttributeError as error:
        print("the whole class:", error)
    else:
        raise SystemExit("it computes now")
print("as seen")
END
"$python" "$work/script.py"
