"""Pretrain a small Llama from random weights, in a loop of your own: two tensor ranks.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/pretrain.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(tp_size=2, dp_shard_size=4)``.
"""

import json
from pathlib import Path

import small
import torch

import hfscale

STEPS = 60

# The source of Python's json package, in rows of 128 tokens.
text = "".join(file.read_text() for file in sorted(Path(json.__file__).parent.glob("*.py")))
ids = torch.tensor(small.tokenizer()(text)["input_ids"])
rows = ids[: len(ids) // 128 * 128].view(-1, 128)

accelerator = hfscale.Accelerator()  # on GPUs: mixed_precision="bf16", here and below
parallel = hfscale.ParallelConfig(tp_size=2)  # 8 GPUs: tp_size=2, dp_shard_size=4
model = hfscale.from_config(small.llama_config(), parallel=parallel, dtype=torch.float32, seed=0)
model.train()
optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=2e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
loader = torch.utils.data.DataLoader(
    [{"input_ids": row, "labels": row} for row in rows], batch_size=8, shuffle=True
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def batches():
    """Begin the data again where they end."""
    while True:
        yield from loader


for step, batch in zip(range(1, STEPS + 1), batches(), strict=False):
    loss = hfscale.train_step(model, batch)
    hfscale.clip_grad_norm_(model, 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step in (1, 2) or step % 20 == 0:
        accelerator.print(f"step {step}: loss {loss:.4f}")

hfscale.save_pretrained(model, "runs/examples/pretrain")  # a plain Hugging Face directory
