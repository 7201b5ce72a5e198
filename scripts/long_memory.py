"""What a training step keeps for its backward pass, by the length of a sequence and the ranks it is cut over.

    python scripts/long_memory.py [--tokens 2048 4096 8192 16384] [--ranks 1 2 4] [--out runs/long-memory.png]

Counted, not timed: bytes of saved tensors of the rank that keeps most, each piece of memory once, parameters not. A
small Llama (hidden 128, 4 layers, 4 heads, 2 of keys and values) trains a step on one sequence, in float32, without
recomputation. A line per number of ranks is drawn, and a table printed.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import LlamaConfig

import hfscale
from hfscale.features.memory.saved import count_saved
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

MIB = 2**20
COLOURS = {1: "#4c566a", 2: "#0b7285", 4: "#d9480f"}


def kept(tokens: int, ranks: int, method: str) -> tuple[int, float]:
    """Bytes that this rank keeps in a step, and the step's loss."""
    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=2048, max_position_embeddings=tokens,
    )  # fmt: skip
    layout = hfscale.ParallelConfig(cp_size=ranks, cp_method=method)
    model = hfscale.from_config(config, parallel=layout, dtype=torch.float32, seed=1).train()
    ids = torch.randint(0, 2048, (1, tokens), generator=torch.Generator().manual_seed(2))
    plan = runtime_of(model).plan
    with count_saved(model, plan.layers, plan.head) as saved:
        loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return saved.total, float(loss)


def measure(tokens: list[int], ranks: list[int], method: str) -> dict[int, list[float]]:
    """Number of ranks -> MiB at each length."""
    found: dict[int, list[float]] = {}
    losses: dict[int, set[float]] = {length: set() for length in tokens}
    bar = tqdm(total=len(tokens) * len(ranks), desc="steps")
    for size in ranks:
        pool = RankPool(size, timeout=900)
        for length in tokens:
            results = pool.run(kept, length, size, method)
            losses[length] |= {loss for _, loss in results}
            found.setdefault(size, []).append(max(count for count, _ in results) / MIB)
            bar.update()
        pool.close()
    bar.close()
    for length, same in losses.items():
        assert max(same) - min(same) < 1e-4, (length, same)  # cut or not, it is the same step
    return found


def draw(path: Path, tokens: list[int], found: dict[int, list[float]]) -> None:
    """One line per number of ranks."""
    figure: Any = Figure(figsize=(7, 4.2), facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for size, counted in found.items():
        label = "one process" if size == 1 else f"cut over {size} ranks"
        axes.plot(tokens, counted, marker="o", color=COLOURS.get(size), label=label)
        axes.annotate(
            f"{counted[-1]:,.0f} MiB",
            (tokens[-1], counted[-1]),
            xytext=(6, -3),
            textcoords="offset points",
        )
    axes.set_xticks(tokens, [f"{length:,}" for length in tokens])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("MiB that a rank keeps for the backward pass")
    axes.set_ylim(bottom=0)
    axes.set_xlim(right=tokens[-1] * 1.14)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--method", default="auto", help="cp_method")
    parser.add_argument("--out", type=Path, default=Path("runs/long-memory.png"))
    arguments = parser.parse_args()
    tokens = sorted(arguments.tokens)
    found = measure(tokens, arguments.ranks, arguments.method)
    print(
        f"{'tokens':>8}"
        + "".join(f"{f'cp {size}':>12}" for size in found)
        + "   MiB kept by the fullest rank"
    )
    for index, length in enumerate(tokens):
        print(f"{length:>8,}" + "".join(f"{counted[index]:>12,.1f}" for counted in found.values()))
    draw(arguments.out, tokens, found)
    print(f"drawn in {arguments.out}")


if __name__ == "__main__":
    main()
