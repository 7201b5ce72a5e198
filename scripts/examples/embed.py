"""Sentence embeddings from pairs, by a contrastive loss of your own in a plain loop: two tensor ranks.

    accelerate launch --config_file scripts/examples/two_processes.yaml scripts/examples/embed.py

On CPUs set OMP_NUM_THREADS=1. On 8 GPUs: ``eight_gpus.yaml``, and ``ParallelConfig(tp_size=8)``
(data ranks would each contrast their own rows alone).
"""

import small
import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, BertConfig

import hfscale

STEPS = 60

tokenizer = small.tokenizer()
accelerator = hfscale.Accelerator()
sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = hfscale.from_config(  # your model: hfscale.from_pretrained("google-bert/bert-base-uncased", ...)
    BertConfig(vocab_size=512, **sizes),
    parallel=hfscale.ParallelConfig(tp_size=2),  # 8 GPUs: tp_size=8
    auto_class=AutoModel,
    dtype=torch.float32,
    seed=0,
)
model.train()
optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-3)


def embed(texts):
    """Return the mean of the last hidden states, of length 1: ``[texts, hidden]``."""
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False).to(
        model.device
    )
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


pairs = [(asked, answer) for asked, answer, _ in small.questions()]
for step in range(1, STEPS + 1):
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(step))[:16]
    asked, answers = zip(*(pairs[index] for index in order), strict=True)
    both = embed([*asked, *answers])  # one pass for questions and answers
    scores = both[:16] @ both[16:].T / 0.05
    # Each question's answer is its own row's.
    loss = cross_entropy(scores, torch.arange(16, device=scores.device))
    loss.backward()
    hfscale.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 2) or step % 20 == 0:
        right = (scores.argmax(1).cpu() == torch.arange(16)).float().mean()
        accelerator.print(f"step {step}: loss {loss.item():.4f}, {right:.0%} of the answers found")

hfscale.save_pretrained(model, "runs/examples/embed")
