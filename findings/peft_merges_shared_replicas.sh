#!/bin/sh
# One would expect: a merge of LoRA on replicated layers (layer_replication) is refused, since replicas share the
# weights of one layer, and each has its own adapter. PEFT has that check, with the words "Cannot merge LORA layers when
# base model layers are replicated".
# What happens: the check asks the dict of adapters for a key "layer_replication", which is only ever an adapter's name,
# so it never raises. Each shared weight gets the sum of its replicas' adapters: merge_and_unload, with safe_merge too,
# returns another model and says nothing. A second adapter with the same config replicates the layers again: the first
# adapter's trained factors in the replicas are replaced, in silence, by those of the layers that are copied.
# Versions: torch 2.14.1, transformers 5.24.0, peft 0.21.2; CPU.
# Seen: the largest difference of logits, with and without a replica, and factors of the first adapter.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
fi
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.arange(3, 15).view(1, 12)


def config(replicated):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layer_replication=replicated)


def trained(replicated):
    """A model whose adapters have random factors, as if they were trained."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))
    model = get_peft_model(model, config(replicated)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def merged(replicated, safe):
    model = trained(replicated)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        after = model.merge_and_unload(safe_merge=safe)(input_ids=IDS).logits
    return (after - before).abs().max().item()


REPLICATED = [(0, 2), (1, 2)]  # the second layer twice
found = {}
for words, replicated in (("no layer", None), ("one layer", REPLICATED)):
    for safe in (False, True):
        found[words, safe] = merged(replicated, safe)
        print(f"{words} replicated, safe_merge={safe}: merging changes logits by {found[words, safe]:.1e}")
model = trained(REPLICATED)
factors = [model.base_model.model.model.layers[index].self_attn.q_proj.lora_A for index in (1, 2)]
original, replica = (each["default"].weight.detach().clone() for each in factors)
with torch.no_grad():
    before = model(input_ids=IDS).logits
    model.add_adapter("second", config(REPLICATED))
    change = (model(input_ids=IDS).logits - before).abs().max().item()
now = model.base_model.model.model.layers[2].self_attn.q_proj.lora_A["default"].weight
print(f"a second adapter added, the first one active: its logits change by {change:.1e};")
same = [torch.equal(now, each) for each in (replica, original)]
print(f"its replica's factor is the trained one: {same[0]}, the first copy's: {same[1]}")
right = max(found["no layer", safe] for safe in (False, True)) < 1e-5
wrong = min(found["one layer", safe] for safe in (False, True)) > 1e-2 and change > 1e-2
raise SystemExit(0 if right and wrong and same == [False, True] else 1)
END
"$python" "$work/script.py" 2> "$work/errors" || { cat "$work/errors"; exit 1; }
