"""A vision-language model learns the colours of pictures, in a loop of your own: two tensor ranks, frozen tower.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/vision.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(tp_size=2, dp_shard_size=4)``.
"""

import random

import small
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import hfscale

STEPS = 60

path = small.llava()  # your model: "llava-hf/llava-1.5-7b-hf"
processor = AutoProcessor.from_pretrained(path)
accelerator = hfscale.Accelerator()
model = hfscale.from_pretrained(
    path,
    parallel=hfscale.ParallelConfig(tp_size=2),  # 8 GPUs: tp_size=2, dp_shard_size=4
    auto_class=AutoModelForImageTextToText,
    dtype=torch.float32,  # on GPUs: mixed_precision="bf16" besides
)
model.model.vision_tower.requires_grad_(False)  # before the first step
model.train()
optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=2e-3)


def rows_of(step):
    """Return this rank's rows of a step: a picture of one colour each, a question and its answer."""
    draw = random.Random(step * hfscale.batch_world(model) + hfscale.batch_rank(model))
    names = [draw.choice(list(small.COLOURS)) for _ in range(8)]
    pictures = [Image.new("RGB", (16, 16), name) for name in names]
    asked = [{"type": "image"}, {"type": "text", "text": "What colour is this?"}]
    questions = [{"role": "user", "content": asked}]
    prompt = processor.apply_chat_template(questions, add_generation_prompt=True)
    texts = [f"{prompt}It is {name}.<end>" for name in names]
    batch = dict(processor(text=texts, images=pictures, padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    learned = batch["attention_mask"].bool()
    # The question.
    learned[:, : len(processor(text=prompt, images=pictures[0])["input_ids"][0])] = False
    return {**batch, "labels": batch["input_ids"].masked_fill(~learned, -100)}


for step in range(1, STEPS + 1):
    loss = hfscale.train_step(model, rows_of(step))
    hfscale.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 2) or step % 20 == 0:
        accelerator.print(f"step {step}: loss {loss:.4f}")

hfscale.save_pretrained(model, "runs/examples/vision")
