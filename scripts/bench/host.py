"""Measure the host's time of a training step where arithmetic is next to nothing: 24 layers, 16 wide.

    python scripts/bench/host.py [--rounds 20] [--layouts one tp2 ...] [--profile tp2] [--out results/host.json]

Short kernels on a GPU are launched by Python, and wait for it. Compared is the main thread's own processor time
(``time.thread_time``) of forward and backward, over stock code's in the same process, and over tensor ranks also over
that of a model cut by hand; steps take turns, and ratios are medians of the rounds' ratios. Ranks beyond the first
share cores with it, which this clock does not see.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from _hand_tp import HandTP
from report import write_report
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import hfscale
from hfscale.testing import RankPool

LAYOUTS: dict[str, tuple[int, dict[str, Any], float]] = {  # ranks, layout, goal
    "one": (1, {}, 1.05),
    "tp2": (2, {"tp_size": 2}, 2.0),
    "pp2": (2, {"pp_size": 2}, 1.1),
    "shard2": (2, {"dp_shard_size": 2}, 1.02),
    "mixture": (1, {}, 1.2),
}


def config(name: str) -> Any:
    """Return 24 layers of Llama, or of a mixture of 8 experts, 16 wide."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 64,
    }
    if name == "mixture":
        return AutoConfig.for_model(
            "qwen3_moe", num_experts=8, moe_intermediate_size=16, num_experts_per_tok=2, **sizes
        )
    return AutoConfig.for_model("llama", **sizes)


def measure(name: str, rounds: int, profile: str | None) -> dict[str, Any]:
    """Return the main thread's seconds of a step, stock and hfscale's, and the median of their ratios."""
    _, sizes, _ = LAYOUTS[name]
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config(name), dtype=torch.float32).train()
    if name == "shard2":  # beside plain FSDP2
        for layer in stock.model.layers:
            fully_shard(layer)
        fully_shard(stock)
    model = hfscale.from_config(
        config(name), parallel=hfscale.ParallelConfig(**sizes), dtype=torch.float32
    ).train()
    ids = torch.arange(16).view(2, 8)
    batch = {"input_ids": ids, "labels": ids}
    microbatches: Any = [batch] * 4 if "pp_size" in sizes else batch

    def step_of_stock() -> None:
        for _ in range(4 if "pp_size" in sizes else 1):
            stock(**batch, use_cache=False).loss.backward()
        stock.zero_grad()

    def step() -> None:
        hfscale.train_step(model, microbatches)
        model.zero_grad()

    runs = {"stock": step_of_stock, "hfscale": step}
    if "tp_size" in sizes:
        cut = HandTP(config(name))

        def step_by_hand() -> None:
            cut.step(ids, ids)
            cut.model.zero_grad()

        runs["by hand"] = step_by_hand
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for turn in range(rounds + 3):
        for kind, run in runs.items():
            start = time.thread_time()
            run()
            if turn >= 3:
                seconds[kind].append(time.thread_time() - start)
    if profile:
        seen = cProfile.Profile(time.thread_time)
        seen.enable()
        for _ in range(5):
            step()
        seen.disable()
        seen.dump_stats(profile)
    share = sizes.get("pp_size", 1)  # a stage does its part of what the stock model does
    found = {kind: statistics.median(each) for kind, each in seconds.items()}
    for other in (kind for kind in runs if kind != "hfscale"):
        ratios = [
            share * own / each for own, each in zip(seconds["hfscale"], seconds[other], strict=True)
        ]
        found["ratio" if other == "stock" else f"ratio to {other}"] = statistics.median(ratios)
    return found


def main() -> None:
    """Measure each layout, and print and write its ratio beside the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--profile", help="write a profile of each layout's steps to this name, and the layout's"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for name in arguments.layouts:
        ranks, _, goal = LAYOUTS[name]
        profile = f"{arguments.profile}-{name}.prof" if arguments.profile else None
        with RankPool(ranks, timeout=600, as_large=False) as pool:
            found = pool.run(measure, name, arguments.rounds, profile)[0]
        results.append({"layout": name, "goal": goal, **found})
        print(
            {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in results[-1].items()
            }
        )
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    write_report(arguments.out, results, torch, transformers)


if __name__ == "__main__":
    main()
