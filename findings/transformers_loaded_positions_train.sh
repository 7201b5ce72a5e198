#!/usr/bin/env bash
# RoFormerForCausalLM of transformers 5.24.0, seen on CPUs on 2026-11-28.
# Expected: sinusoidal positions, which the class makes with requires_grad=False, are constants, before and after a load.
# Seen: from_pretrained gives them requires_grad=True, and since 5.24.0 their forward is no longer under torch.no_grad():
# they have a gradient, and an optimizer trains them. A model made from its config keeps them as they are. With 5.23.0 they
# have requires_grad=True too, and no gradient.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.14.1 transformers==5.24.0
"$place/venv/bin/python" - "$place/model" <<'PYTHON'
import sys

import torch
from transformers import RoFormerConfig, RoFormerForCausalLM

config = RoFormerConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    is_decoder=True,
)
made = RoFormerForCausalLM(config)
made.save_pretrained(sys.argv[1])
ids = torch.arange(16).view(2, 8)
trained = []
for words, model in (("made", made), ("loaded", RoFormerForCausalLM.from_pretrained(sys.argv[1]))):
    model(input_ids=ids, labels=ids).loss.backward()
    positions = model.roformer.encoder.embed_positions.weight
    trained.append(positions.grad is not None and bool(positions.grad.any()))
    print(f"{words}: requires_grad={positions.requires_grad}, a gradient: {trained[-1]}")
sys.exit(trained != [False, True])
PYTHON
