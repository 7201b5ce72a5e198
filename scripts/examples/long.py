"""Train on long sequences, each of which two context ranks share: rows of 4,096 tokens.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/long.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(cp_size=8)`` for
sequences of 131,072 tokens, with ``memory=hfscale.MemoryConfig(recompute="full")``.
"""

import argparse
import inspect

import small
import torch

import hfscale

STEPS = 12
LENGTH = 4096

# The source of two modules of the standard library.
ids = small.tokenizer()(inspect.getsource(argparse) + inspect.getsource(inspect))["input_ids"]
rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)

accelerator = hfscale.Accelerator()
model = hfscale.from_config(
    small.llama_config(num_hidden_layers=2, max_position_embeddings=LENGTH),
    parallel=hfscale.ParallelConfig(cp_size=2),  # 8 GPUs: cp_size=8
    dtype=torch.float32,  # on GPUs: mixed_precision="bf16" besides
    seed=0,
)
model.train()
optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=3e-3)
for step in range(1, STEPS + 1):
    # Both ranks are given the whole row, and each computes a part of it.
    row = rows[step % len(rows)].unsqueeze(0)
    loss = hfscale.train_step(model, {"input_ids": row, "labels": row})
    hfscale.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 2) or step % 6 == 0:
        accelerator.print(f"step {step}: loss {loss:.4f}")

hfscale.save_pretrained(model, "runs/examples/long")
