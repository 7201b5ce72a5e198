"""A reward model from pairs of answers with TRL's RewardTrainer: two data ranks.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/reward.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(dp_shard_size=8)``.
"""

import small
import torch
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig

import hfscale
from hfscale.trl import RewardTrainer

STEPS = 60

model = hfscale.from_pretrained(
    small.llama(),  # your model; it gets a head of one number, on the last token
    parallel=hfscale.ParallelConfig(dp_shard_size=2),  # 8 GPUs: dp_shard_size=8
    auto_class=AutoModelForSequenceClassification,
    num_labels=1,
    dtype=torch.float32,  # on GPUs: mixed_precision="bf16" besides
)
args = RewardConfig(
    output_dir="runs/examples/reward",
    max_steps=STEPS,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    bf16=False,  # on GPUs: True
    logging_steps=20,
    report_to="none",
)
data = small.preferences()  # your rows of "prompt", "chosen" and "rejected"
trainer = RewardTrainer(
    model=model, args=args, train_dataset=data, processing_class=small.tokenizer()
)
trainer.train()
trainer.save_model()
