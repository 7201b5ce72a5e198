"""Direct preference optimization with TRL's DPOTrainer: two tensor ranks.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/dpo.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(tp_size=2, dp_shard_size=4)``.
"""

import small
import torch
from trl import DPOConfig

import hfscale
from hfscale.trl import DPOTrainer

STEPS = 60

path = small.llama()  # your model: what supervised fine-tuning has made
parallel = hfscale.ParallelConfig(tp_size=2)  # 8 GPUs: tp_size=2, dp_shard_size=4
# On GPUs: mixed_precision="bf16" besides.
model = hfscale.from_pretrained(path, dtype=torch.float32, parallel=parallel)
args = DPOConfig(
    output_dir="runs/examples/dpo",
    max_steps=STEPS,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    beta=0.1,
    bf16=False,  # on GPUs: True
    logging_steps=20,
    report_to="none",
)
data = small.preferences()  # your rows of "prompt", "chosen" and "rejected"
trainer = DPOTrainer(model=model, args=args, train_dataset=data, processing_class=small.tokenizer())
trainer.train()  # the reference model that TRL makes gets the same layout
trainer.save_model()
