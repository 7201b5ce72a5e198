"""Text classification with hfscale.Trainer, BERT and an accuracy: two tensor ranks.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/classify.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(tp_size=2, dp_shard_size=4)``.
"""

import small
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    TrainingArguments,
)

import hfscale

STEPS = 60

tokenizer = small.tokenizer()
kinds = {"How": 0, "Where": 1, "What": 2}  # what a question asks: a number, a place, a sum
rows = [
    {**tokenizer(asked), "labels": kinds[asked.split()[0]]} for asked, _, _ in small.questions()
]
data = Dataset.from_list(rows).train_test_split(0.2, seed=0)

sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = hfscale.from_config(  # your model: hfscale.from_pretrained("google-bert/bert-base-uncased", num_labels=3, ...)
    BertConfig(vocab_size=512, num_labels=3, **sizes),
    parallel=hfscale.ParallelConfig(tp_size=2),  # 8 GPUs: tp_size=2, dp_shard_size=4
    auto_class=AutoModelForSequenceClassification,
    dtype=torch.float32,
    seed=0,
)
args = TrainingArguments(
    output_dir="runs/examples/classify",
    max_steps=STEPS,
    per_device_train_batch_size=16,
    learning_rate=1e-3,
    eval_strategy="steps",
    eval_steps=STEPS // 2,
    logging_steps=20,
    report_to="none",
)
trainer = hfscale.Trainer(
    model=model,
    args=args,
    train_dataset=data["train"],
    eval_dataset=data["test"],
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=lambda found: {
        "accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())
    },
)
trainer.train()
trainer.save_model()
