"""Sequence to sequence with hfscale.Seq2SeqTrainer and T5, which writes numbers in words: two pipeline stages.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/seq2seq.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and
``ParallelConfig(pp_size=2, tp_size=2, dp_shard_size=2)``.
"""

import random

import small
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainingArguments,
    T5Config,
)

import hfscale

STEPS = 60

tokenizer = small.tokenizer()
words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
draw = random.Random(0)
numbers = [[draw.randrange(10) for _ in range(3)] for _ in range(400)]
rows = [
    {
        "input_ids": tokenizer(" ".join(map(str, number)) + "<end>")["input_ids"],
        "labels": tokenizer(" ".join(words[digit] for digit in number) + "<end>")["input_ids"],
    }
    for number in numbers
]
data = Dataset.from_list(rows).train_test_split(32, seed=0)

config = T5Config(  # your model: hfscale.from_pretrained("google-t5/t5-base", ...)
    vocab_size=512,
    d_model=64,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    d_kv=16,
    decoder_start_token_id=0,
    eos_token_id=1,
)
model = hfscale.from_config(
    config,
    # 8 GPUs: pp_size=2, tp_size=2, dp_shard_size=2.
    parallel=hfscale.ParallelConfig(pp_size=2, num_microbatches=2),
    auto_class=AutoModelForSeq2SeqLM,
    dtype=torch.float32,
    seed=0,
)
args = Seq2SeqTrainingArguments(
    output_dir="runs/examples/seq2seq",
    max_steps=STEPS,
    per_device_train_batch_size=32,
    learning_rate=5e-3,
    logging_steps=20,
    eval_strategy="steps",
    eval_steps=STEPS,
    report_to="none",
)
trainer = hfscale.Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorForSeq2Seq(tokenizer),
)
trainer.train()
trainer.save_model()
