#!/bin/sh
# One would expect: LoRA of a linear layer changes what the model computes, and gets gradients; where it cannot, PEFT
# says so, as it does for out_proj and conv1d of Mamba.
# What happens: state-space mixers of Jamba, Mamba and Falcon Mamba read dt_proj's weight and never call dt_proj. PEFT
# wraps it (target_modules="all-linear" does in Jamba, ["dt_proj"] in all three), counts its factors as trainable, and
# they get no gradient: logits do not change with them, until the adapter is merged, which does change them.
# Versions: transformers 5.24.0, peft 0.21.2, torch 2.14.1; CPU, where no fused kernel runs.
# Seen: gradients of all adapters with random values; logits before and after merging.
# PYTHON=... uses an environment that has these packages; otherwise they are installed in a temporary one.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=${PYTHON:-}
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    "$python" -m pip install --quiet torch==2.14.1 transformers==5.24.0 peft==0.21.2
fi
cat > "$work/script.py" <<'END'
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, FalconMambaConfig, JambaConfig, MambaConfig

JAMBA = JambaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=67,
    attn_layer_period=2,
    attn_layer_offset=1,
    num_experts=2,
    pad_token_id=0,
)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 67}
CASES = [
    (JAMBA, "all-linear"),
    (MambaConfig(**SMALL), ["dt_proj"]),
    (FalconMambaConfig(**SMALL), ["dt_proj"]),
]
ids = torch.arange(1, 9)[None]
for config, targets in CASES:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config)
    model = get_peft_model(stock, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name and "dt_proj" in name:
            torch.nn.init.normal_(parameter)
    if targets != "all-linear":
        # With nothing else to train there is no graph at all.
        model.get_input_embeddings().weight.requires_grad_(True)
    model(input_ids=ids, labels=ids).loss.backward()
    silent = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    model.eval()
    with torch.no_grad():
        apart = model(input_ids=ids).logits
        with model.disable_adapter():
            without = model(input_ids=ids).logits
        merged = model.merge_and_unload()(input_ids=ids).logits
    print(config.model_type, "without a gradient:", sorted({n.split(".lora_")[0] for n in silent}))
    print("  logits change by the adapter:", not torch.equal(apart, without))
    print("  logits change by merging it:", not torch.allclose(apart, merged, atol=1e-6))
    assert silent
    assert all(".dt_proj.lora_" in name for name in silent)
    assert torch.equal(apart, without)
    assert not torch.allclose(apart, merged, atol=1e-6)
print("as seen")
END
"$python" "$work/script.py"
