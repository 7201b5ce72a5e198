"""LoRA over 4-bit weights, in a loop of your own: two pipeline stages.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/qlora.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and
``ParallelConfig(pp_size=4, tp_size=2, num_microbatches=16)``.
"""

import small
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

import hfscale

STEPS = 60

path = small.llama()  # your model: "meta-llama/Llama-3.3-70B-Instruct"
accelerator = hfscale.Accelerator()
model = hfscale.from_pretrained(
    path,
    # 8 GPUs: pp_size=4, tp_size=2, 16 microbatches.
    parallel=hfscale.ParallelConfig(pp_size=2, num_microbatches=4),
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    dtype=torch.float32,  # on GPUs: torch.bfloat16
)
model.train()
optimizer = hfscale.create_optimizer(model, "adamw_8bit", lr=1e-2)


def collate(rows):
    """Render conversations, and pad them; padding has no labels."""
    tokenizer = small.tokenizer()
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False))
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


data = small.conversations()  # your rows of "messages"
loader = torch.utils.data.DataLoader(
    data, batch_size=16, shuffle=True, drop_last=True, collate_fn=collate
)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
step = 0
while step < STEPS:
    for batch in loader:
        # The stages of a pipeline run this batch as four microbatches.
        loss = hfscale.train_step(model, batch)
        hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step in (1, 2) or step % 20 == 0:
            accelerator.print(f"step {step}: loss {loss:.4f}")
        if step == STEPS:
            break

hfscale.save_pretrained(model, "runs/examples/qlora")  # the adapter, in PEFT's own format
