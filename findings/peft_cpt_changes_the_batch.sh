#!/usr/bin/env bash
# CPT of PEFT 0.21.2: a pass changes the batch that it is given.
# Expected: a forward pass leaves the tensors of its batch as they are, so that a second pass over the same batch has the
# same loss; a loss of no label is 0, or is told.
# Seen: every pass adds the largest of `cpt_tokens_type_mask` to `input_type_mask` in place (4, 8, 12, 16 over three
# passes, where that is 4). A prompt of the kinds [1, 2] makes labels of 6 after one pass and of 8 after two, and labels
# are multiples of 4: the loss of one batch is NaN and 4.17 in turns, and always NaN without `input_type_mask`, whose
# default is 4. Nothing is said.
# Read in `PeftModelForCausalLM._cpt_forward`, and run with torch 2.13.0, transformers 5.23.0, on a CPU.
# Exits with 1 if it behaves otherwise.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 peft==0.21.2
"$place/venv/bin/python" - <<'PYTHON'
import math
import sys
import warnings

import torch
from peft import CPTConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")


def made(kinds):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    asked = CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[1] * len(kinds), cpt_mask=[1] * len(kinds), cpt_tokens_type_mask=kinds
    )
    return get_peft_model(LlamaForCausalLM(config), asked)


ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

model = made([1, 2, 3, 4])
kinds = torch.full_like(ids, 4)
seen = []
for _ in range(3):
    model(**batch, input_type_mask=kinds)
    seen.append(int(kinds[0, 0]))
print("the batch's input_type_mask after each pass (given: 4):", seen)

model = made([1, 2])
kinds = torch.full_like(ids, 4)
losses = [float(model(**batch, input_type_mask=kinds).loss.detach()) for _ in range(4)]
print("losses of four passes over one batch, behind a prompt of the kinds [1, 2]:", losses)
without = float(model(**batch).loss.detach())
print("without input_type_mask:", without)
as_told = seen == [8, 12, 16] and [math.isnan(each) for each in losses] == [True, False, True, False]
sys.exit(0 if as_told and math.isnan(without) else 1)
PYTHON
