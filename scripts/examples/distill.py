"""Distillation: a small model learns what a larger one predicts, in a loop of your own; two tensor ranks.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/distill.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(tp_size=2, dp_shard_size=4)``.
"""

import small
import torch

import hfscale

STEPS = 60

rows = small.tokenizer()(
    [f"{asked} {answer}" for asked, answer, _ in small.questions()], padding=True
)
ids, mask = torch.tensor(rows["input_ids"]), torch.tensor(rows["attention_mask"])
batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

accelerator = hfscale.Accelerator()  # starts the processes
# 8 GPUs: tp_size=2, dp_shard_size=4; a teacher may have its own.
parallel = hfscale.ParallelConfig(tp_size=2)
large = hfscale.from_config(small.llama_config(), parallel=parallel, dtype=torch.float32)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
student = hfscale.from_config(
    small.llama_config(**sizes), parallel=parallel, dtype=torch.float32, seed=1
)


def train(model, steps, **given):
    """Train on the batch, and print the loss."""
    optimizer = hfscale.create_optimizer(model.train(), "adamw_torch", lr=3e-3)
    for step in range(1, steps + 1):
        loss = hfscale.train_step(model, batch, **given)
        hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 2) or step % 20 == 0:
            accelerator.print(f"step {step}: loss {loss:.4f}")


train(large, STEPS)  # yours is trained: hfscale.from_pretrained("Qwen/Qwen3-32B", ...)
# The Jensen-Shannon divergence.
teacher = hfscale.Teacher(large, student, beta=0.5, temperature=1.0)
train(student, STEPS, teacher=teacher)
hfscale.save_pretrained(student, "runs/examples/distill")
