"""Reinforcement learning (GRPO) with TRL and a reward function: two tensor ranks, which generate together.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/grpo.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(tp_size=2, dp_shard_size=4)``.
"""

import small
import torch
from trl import GRPOConfig

import hfscale
from hfscale.trl import GRPOTrainer

STEPS = 20


def share_of_vowels(completions, **_):
    """Return the share of vowels in what the model writes."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text)) for text in texts]


path = small.llama()  # your model
parallel = hfscale.ParallelConfig(tp_size=2)  # 8 GPUs: tp_size=2, dp_shard_size=4
# On GPUs: mixed_precision="bf16" besides.
model = hfscale.from_pretrained(path, dtype=torch.float32, parallel=parallel)
args = GRPOConfig(
    output_dir="runs/examples/grpo",
    max_steps=STEPS,
    per_device_train_batch_size=16,
    num_generations=8,
    max_completion_length=12,
    learning_rate=2e-3,
    bf16=False,  # on GPUs: True
    logging_steps=5,
    report_to="none",
)
trainer = GRPOTrainer(
    model=model,
    args=args,
    reward_funcs=share_of_vowels,
    train_dataset=small.prompts(),  # your rows of "prompt"
    processing_class=small.tokenizer(),
)
trainer.train()
trainer.save_model()
trainer.save_state()  # the log
