"""A mixture of experts: each of two data ranks holds half of the experts, and tokens travel to them.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/moe.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(ep_size=8)``.
"""

import json
from pathlib import Path

import small
import torch
from transformers import Qwen3MoeConfig

import hfscale

STEPS = 40

text = "".join(file.read_text() for file in sorted(Path(json.__file__).parent.glob("*.py")))
ids = torch.tensor(small.tokenizer()(text)["input_ids"])
rows = ids[: len(ids) // 128 * 128].view(-1, 128)

accelerator = hfscale.Accelerator()
sizes = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
experts = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
model = hfscale.from_config(  # your model: hfscale.from_pretrained("Qwen/Qwen3-30B-A3B", ...)
    Qwen3MoeConfig(vocab_size=512, **sizes, **experts),
    parallel=hfscale.ParallelConfig(ep_size=2),  # 8 GPUs: ep_size=8
    routing=hfscale.RoutingConfig(balance_loss=0.01),
    dtype=torch.float32,  # on GPUs: mixed_precision="bf16" besides
    seed=0,
)
model.train()
optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=2e-3)
loader = torch.utils.data.DataLoader(
    [{"input_ids": row, "labels": row} for row in rows], batch_size=4, shuffle=True
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
while step < STEPS:
    for batch in loader:  # each data rank gets its own four rows
        loss = hfscale.train_step(model, batch)
        hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step in (1, 2) or step % 20 == 0:
            accelerator.print(f"step {step}: loss {loss:.4f}")
        if step == STEPS:
            break

for layer in hfscale.expert_load(model).layers:  # of the last step; call it on every rank
    accelerator.print(f"{layer.name}: tokens of each expert {layer.tokens}")
hfscale.save_pretrained(model, "runs/examples/moe")
