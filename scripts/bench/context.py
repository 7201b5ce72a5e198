"""Time a step with its sequences cut over two ranks against the same step in one process.

    python scripts/bench/context.py [--tokens 2048] [--rounds 5] [--out scripts/bench/results/context.json]

Two rank processes with one thread each hold a Llama (hidden 256, 4 layers, 8 heads, 2 of keys and values): forward and
backward passes of one sequence, and clipping. In a round each candidate runs one step in turn: ``one process`` on rank
0, while the other waits, and each method on both. Ratios are medians of the per-round ratios to one process; half is
the least that two ranks can take. Losses are compared before.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from report import write_report
from transformers import LlamaConfig, LlamaForCausalLM

import hfscale
from hfscale.testing import RankPool

METHODS = ("gather", "ring", "heads")
_state: dict[str, Any] = {}


def build(tokens: int, directory: str) -> dict[str, float]:
    """Every candidate, in every rank; the loss of each."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=4096, max_position_embeddings=tokens,
    )  # fmt: skip
    for method in METHODS:
        layout = hfscale.ParallelConfig(cp_size=2, cp_method=method)
        _state[method] = hfscale.from_config(config, parallel=layout, dtype=torch.float32, seed=1)
    hfscale.save_pretrained(_state["gather"], directory)
    _state["one process"] = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    ids = torch.randint(0, 4096, (1, tokens), generator=torch.Generator().manual_seed(2))
    _state["batch"] = {"input_ids": ids, "labels": ids}
    return {name: float(step(name)[1]) for name in (*METHODS, "one process")}


def step(name: str) -> tuple[float, torch.Tensor]:
    """Seconds, and the loss."""
    model = _state[name]
    batch = _state["batch"]
    dist.barrier()
    begin = time.perf_counter()
    loss = torch.zeros(())
    if name != "one process":
        loss = hfscale.train_step(model, batch)
        hfscale.clip_grad_norm_(model, 1.0)
    elif dist.get_rank() == 0:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dist.barrier()
    seconds = time.perf_counter() - begin
    model.zero_grad()
    return seconds, loss.detach()


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """Ratios to one process."""
    with RankPool(2, timeout=900) as pool, tempfile.TemporaryDirectory() as directory:
        losses = pool.run(build, tokens, f"{directory}/weights")[0]
        assert max(losses.values()) - min(losses.values()) < 1e-3, losses
        times: dict[str, list[float]] = {name: [] for name in (*METHODS, "one process")}
        for _ in range(rounds):
            for name, found in times.items():
                found.append(pool.run(step, name)[0][0])
    alone = times["one process"]
    ratios = {name: [a / b for a, b in zip(times[name], alone, strict=True)] for name in METHODS}
    return {
        "tokens": tokens,
        "seconds of one process": statistics.median(alone),
        "ratios": {name: statistics.median(found) for name, found in ratios.items()},
        "spread": {name: [min(found), max(found)] for name, found in ratios.items()},
    }


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = [measure(tokens, arguments.rounds) for tokens in arguments.tokens]
    for each in found:
        print(each)
    write_report(arguments.out, found, torch, transformers, hfscale)


if __name__ == "__main__":
    main()
