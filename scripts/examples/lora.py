"""LoRA on every linear layer with TRL's SFTTrainer: two tensor ranks.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/lora.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(tp_size=2, dp_shard_size=4)``.
"""

import small
import torch
from peft import LoraConfig
from trl import SFTConfig

import hfscale
from hfscale.trl import SFTTrainer

STEPS = 60

path = small.llama()  # your model: "Qwen/Qwen3-8B"
parallel = hfscale.ParallelConfig(tp_size=2)  # 8 GPUs: tp_size=2, dp_shard_size=4
# On GPUs: dtype=torch.bfloat16.
model = hfscale.from_pretrained(path, dtype=torch.float32, parallel=parallel)
args = SFTConfig(
    output_dir="runs/examples/lora",
    max_steps=STEPS,
    per_device_train_batch_size=16,
    learning_rate=1e-2,
    bf16=False,  # on GPUs: True
    logging_steps=20,
    report_to="none",
)
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=small.conversations(),  # your rows of "messages"
    processing_class=small.tokenizer(),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()  # PEFT's own format
merged = hfscale.merge_and_unload(trainer.model)
hfscale.save_pretrained(merged, "runs/examples/lora-merged")  # an ordinary checkpoint
