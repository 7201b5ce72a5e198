"""Losses of a small Llama with what its layers keep in 8 bits, beside the same run without.

    python scripts/bench/compression.py [--steps 200] [--out scripts/bench/results/compression.json]

Bytes of Python's standard library, 8 rows of 128 a step, AdamW at 1e-3, float32, one process. Besides: the error
of the first step's gradient, and the bytes of what is kept in 8 bits over those before.
"""

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import trange
from transformers import LlamaConfig

import hfscale

ROWS = 8
LENGTH = 128


def text() -> Tensor:
    """``[n]`` bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    return torch.tensor(list(b"".join(path.read_bytes() for path in files)))


def trained(steps: int, compress: bool) -> tuple[list[float], list[Tensor], dict[str, float]]:
    """Losses, the first step's gradients, and what the model says of itself."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=256,
    )  # fmt: skip
    memory = hfscale.MemoryConfig(compress_activations="1KiB" if compress else False)
    model = hfscale.from_config(config, seed=0, memory=memory, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    data = text()
    losses = list[float]()
    first = list[Tensor]()
    for step in trange(steps, desc="in 8 bits" if compress else "as it is"):
        starts = torch.randint(0, len(data) - LENGTH, (ROWS,), generator=generator).tolist()
        ids = torch.stack([data[start : start + LENGTH] for start in starts])
        losses.append(float(hfscale.train_step(model, {"input_ids": ids, "labels": ids})))
        if step == 0:
            first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return losses, first, dict(hfscale.metrics(model))


def main() -> None:
    """Run both, print and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    plain, wanted, _ = trained(arguments.steps, compress=False)
    rounded, found, metrics = trained(arguments.steps, compress=True)
    apart = torch.cat([(a - b).flatten() for a, b in zip(found, wanted, strict=True)]).norm()
    means = range(0, arguments.steps, max(1, arguments.steps // 10))
    result: dict[str, Any] = {
        "gradient_error": float(apart / torch.cat([g.flatten() for g in wanted]).norm()),
        "bytes_in_8_bits_over_before": metrics["compressed_activation_bytes"]
        / metrics["activation_bytes"],
        "largest_difference_of_losses": max(
            abs(a - b) for a, b in zip(plain, rounded, strict=True)
        ),
        "steps": list(means),
        "as_it_is": [round(plain[step], 4) for step in means],
        "in_8_bits": [round(rounded[step], 4) for step in means],
        "mean_of_last_20": [round(sum(each[-20:]) / 20, 4) for each in (plain, rounded)],
    }
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
