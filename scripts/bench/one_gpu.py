"""One process: a stock model against the same model through hfscale, for step time and peak memory.

    python scripts/bench/one_gpu.py [--rounds 10] [--out scripts/bench/results/one_gpu.json]

Meant for one GPU (``tp_size=1``: nothing is cut, what differs is the loss, which never makes whole logits; the third
compiles each layer). Each is
built, warmed up, timed and dropped in turn, twice over in opposite orders, so that neither profits from the order.
Peaks are of torch's allocated bytes. Without a GPU it runs a tiny model, to show that it runs.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

import hfscale

CANDIDATES = ("stock", "hfscale", "hfscale, compiled")


def config_for(device: torch.device) -> tuple[LlamaConfig, int, int]:
    """Model, batch and sequence: the shape of Llama 3.2 1B on a GPU."""
    if device.type == "cpu":
        return (
            LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=512),
            2,
            64,
        )
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    return config, 4, 2048


def measure(kind: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """Median seconds of a step (forward, backward, fused AdamW) and the peak of allocated bytes."""
    config, batch, sequence = config_for(device)
    torch.manual_seed(0)
    with device:  # values are drawn there
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = (
        model if kind == "stock" else hfscale.parallelize(model, compile="compiled" in kind)
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (batch, sequence), device=device)
    seconds = []
    for index in range(rounds + 3):
        if index == 3:
            _reset_peak(device)
        start = time.perf_counter()
        if kind == "stock":
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        else:
            loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(device)
        if index >= 3:
            seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"seconds": statistics.median(seconds), "peak_bytes": peak, "tokens": batch * sequence}


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure both, twice, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in CANDIDATES}
    for order in (CANDIDATES, CANDIDATES[::-1]):
        for kind in order:
            runs[kind].append(measure(kind, device, arguments.rounds))
            if arguments.out:  # should a later one fail, or the time run out
                arguments.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    best = {kind: min(run["seconds"] for run in found) for kind, found in runs.items()}
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hfscale": hfscale.__version__,
        },
        "runs": runs,
        **{
            f"{kind} / stock, step": round(best[kind] / best["stock"], 3) for kind in CANDIDATES[1:]
        },
    }
    if device.type == "cuda":
        peaks = {kind: min(run["peak_bytes"] for run in found) for kind, found in runs.items()}
        report |= {
            f"{kind} / stock, peak memory": round(peaks[kind] / peaks["stock"], 3)
            for kind in CANDIDATES[1:]
        }
    print(json.dumps(report, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
