#!/bin/sh
# One would expect: a model made with dtype=torch.bfloat16 can be sharded layer by layer with fully_shard.
# What happens: since transformers 5.24 the routers of some mixtures of experts (DeepSeek-V3, GLM-4 MoE and others) are
# parameters of 32 bits whatever dtype is asked for. FSDP2 wants one type for the trained parameters that it shards
# together, so its first forward pass raises AssertionError: "FSDP expects uniform original parameter dtype".
# Versions: torch 2.14.1, transformers 5.24.0; CPU, one process over gloo. With transformers 5.23.0 it trains.
# Seen: the types of DeepSeek-V3's parameters, and what a forward pass of the sharded model says.
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
export OMP_NUM_THREADS=1
cat > "$work/script.py" <<'END'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DeepseekV3Config

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
config = DeepseekV3Config(
    vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
    first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
types = {str(parameter.dtype) for parameter in model.parameters()}
wide = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32]
print("asked for torch.bfloat16, made in", sorted(types), wide)
mesh = init_device_mesh("cpu", (1,))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
ids = torch.arange(16).view(2, 8)
said = "nothing"
try:
    model(input_ids=ids, labels=ids).loss.backward()
except AssertionError as error:
    said = str(error)
print("the sharded model says:", said)
dist.destroy_process_group()
raise SystemExit(0 if wide and "uniform original parameter dtype" in said else 1)
END
"$python" "$work/script.py"
