#!/bin/sh
# One would expect: an adapter of linear layers treats each token by itself, so that a causal model stays causal, and a
# row has the same logits alone and in a batch, and with a cache and without.
# What happens: Lily weights its experts by their mean probability over all tokens of all rows of a pass. Each token's
# logits depend on later tokens, on the other rows and on padding, masked or not: training reads the tokens that it
# predicts, and generation, which has no later tokens, and with a cache only the newest, computes another model. PEFT
# documents that experts depend on data (a merge is refused), not on which.
# Versions: torch 2.14.1, transformers 5.24.0, peft 0.21.2; CPU, float64.
# Seen: the largest change of logits of the same tokens, with Lily and with LoRA.
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
from peft import LilyConfig, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.randint(3, 60, (3, 8), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
CONFIGS = {
    "Lily": LilyConfig(r=8, stride_A=1, num_B=2, target_modules=["q_proj", "v_proj"]),
    "LoRA": LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
}


def changes(config):
    """Return how much the logits of the same tokens change with what should not matter to them."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)).double()
    model = get_peft_model(model, config).double().eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)

    def logits(ids, mask=None, **given):
        return model(input_ids=ids, attention_mask=mask, **given)

    with torch.no_grad():
        whole = logits(IDS).logits
        later = IDS.clone()
        later[:, -1] = 61
        padded = [torch.nn.functional.pad(each, (0, 4)) for each in (IDS, MASK)]
        cache = logits(IDS[:, :-1], use_cache=True).past_key_values
        return {
            "another last token": (logits(later).logits - whole)[:, :-1],
            "other rows left out": logits(IDS[:1]).logits - whole[:1],
            "masked padding added": logits(*padded).logits[:, :8] - whole,
            "a cache": logits(IDS[:, -1:], past_key_values=cache).logits - whole[:, -1:],
        }


as_told = True
for name, config in CONFIGS.items():
    for cause, difference in changes(config).items():
        largest = difference.abs().max().item()
        print(f"{name}, {cause}: logits change by {largest:.1e}")
        as_told = as_told and (largest > 1e-3 if name == "Lily" else largest < 1e-9)
raise SystemExit(0 if as_told else 1)
END
"$python" "$work/script.py" 2> "$work/errors" || { cat "$work/errors"; exit 1; }
