"""Supervised fine-tuning on conversations with TRL's SFTTrainer: two data ranks share weights and states (FSDP2).

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/sft.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(dp_shard_size=8)``.
"""

import small
import torch
from trl import SFTConfig

import hfscale
from hfscale.trl import SFTTrainer

STEPS = 60

path = small.llama()  # your model: "Qwen/Qwen3-8B"
parallel = hfscale.ParallelConfig(dp_shard_size=2)  # 8 GPUs: dp_shard_size=8
# On GPUs: mixed_precision="bf16" besides.
model = hfscale.from_pretrained(path, dtype=torch.float32, parallel=parallel)
args = SFTConfig(
    output_dir="runs/examples/sft",
    max_steps=STEPS,
    per_device_train_batch_size=8,  # rows of each data rank
    learning_rate=3e-3,
    assistant_only_loss=True,  # the tokenizer's chat template marks what the assistant says
    bf16=False,  # on GPUs: True
    logging_steps=20,
    report_to="none",
)
data = small.conversations()  # your rows of "messages"
trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=small.tokenizer())
trainer.train()
trainer.save_model()  # a plain Hugging Face directory
