"""Time what hfscale computes by itself on a GPU: head and loss, projections in 8 bits, stochastic rounding.

    python scripts/bench/kernels_gpu.py [--rounds 10] [--profile] [--out scripts/bench/results/kernels_gpu.json]

Each row is run in turn with the others of its kind, ``--rounds`` times, after two rounds of warming up; medians of
device time by events. Peaks are of torch's allocated bytes above the inputs. *unfused* is the same without
:mod:`hfscale.distributed.ops.fused`. Results are written after each kind. Without a GPU it runs tiny shapes.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

import hfscale
from hfscale.distributed.ops import fused, head_cross_entropy, vocab_cross_entropy
from hfscale.distributed.ops.vocab_cross_entropy import VocabularySlice
from hfscale.optim import stock as optim_rounding
from hfscale.optim.stock import write_rounded

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
FUSED = fused.is_fused


def timed(rows: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Return each row's median milliseconds and peak of allocated MiB; ``*unfused*`` rows without compiled kernels."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    peaks = dict.fromkeys(rows, 0.0)
    for turn in range(rounds + 2):
        for name, run in rows.items():
            for module in (fused, vocab_cross_entropy, optim_rounding):
                module.is_fused = (lambda _: False) if "unfused" in name else FUSED
            before = _allocated()
            start = time.perf_counter()
            if GPU:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                end.synchronize()
            else:
                run()
            if turn > 1:
                seconds[name].append(
                    begin.elapsed_time(end) if GPU else 1e3 * (time.perf_counter() - start)
                )
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20 if GPU else 0.0
    for module in (fused, vocab_cross_entropy, optim_rounding):
        module.is_fused = FUSED
    return {
        name: {"ms": round(statistics.median(seconds[name]), 3), "MiB": round(peaks[name])}
        for name in rows
    }


def _allocated() -> int:
    gc.collect()
    if not GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def ceilings(rounds: int) -> dict[str, Any]:
    """Time a large copy and a large product, which nothing else can beat."""
    size = 8192 if GPU else 64
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    big = torch.empty(2**30 if GPU else 2**10, device=DEVICE, dtype=torch.bfloat16)
    found = timed({"product": lambda: a @ b, "copy": lambda: big.clone()}, rounds)
    return {
        "TFLOP/s, bfloat16": round(2 * size**3 / found["product"]["ms"] / 1e9),
        "TB/s, read and written": round(4 * big.numel() / found["copy"]["ms"] / 1e9, 2),
    }


def head_and_loss(rounds: int) -> dict[str, Any]:
    """Time forward and backward of a head of 128 thousand words over 8192 rows, in bfloat16."""
    rows, hidden, words = (8192, 2048, 128256) if GPU else (64, 32, 512)
    x = torch.randn(rows, hidden, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    head = torch.nn.Linear(hidden, words, bias=False, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.randint(0, words, (rows,), device=DEVICE)

    def done(loss: torch.Tensor) -> None:
        loss.backward()
        x.grad = head.weight.grad = None

    def ours(elements: int | None) -> None:
        before = head_cross_entropy._CHUNK_ELEMENTS_GPU
        head_cross_entropy._CHUNK_ELEMENTS_GPU = elements or before
        with head_cross_entropy.each_gradient_once():
            made = head_cross_entropy.LinearRows(head.weight, None, None, True, True)
            slice_ = VocabularySlice(0, words, words)
            done(
                head_cross_entropy.head_cross_entropy(
                    x, targets, made, vocabulary=slice_, valid=rows
                )
            )
        head_cross_entropy._CHUNK_ELEMENTS_GPU = before

    variants: dict[str, Callable[[], Any]] = {
        "stock": lambda: done(F.cross_entropy(F.linear(x, head.weight).float(), targets)),
        "hfscale": lambda: ours(None),
        "hfscale, unfused": lambda: ours(None),
        **{f"hfscale, chunks of 2^{n}": (lambda n=n: ours(1 << n)) for n in (25, 26, 27, 28)},
    }
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        variants["Liger"] = lambda: done(liger(head.weight, x, targets))
    except ImportError:
        pass
    return timed(variants, rounds)


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "autocast": {"mixed_precision": "bf16"},
    "fp8 tensorwise": {"mixed_precision": "fp8"},
    "fp8 rowwise": {"mixed_precision": "fp8", "float8": hfscale.Float8Config("rowwise")},
}


def layers(rounds: int) -> dict[str, Any]:
    """Time a training step of four layers of Llama 8B's shape over 8192 tokens, in several precisions."""
    rows = {}
    for name, given in PRECISIONS.items():
        rows[name] = step_of_layers(given, torch.float32 if name == "autocast" else torch.bfloat16)
        if "tensorwise" in name:
            rows[f"{name}, unfused"] = rows[name]
    return timed(rows, rounds)


def compiled(rounds: int) -> dict[str, Any]:
    """Time the same with each layer compiled, beside plain ones."""
    kinds = ("bf16", "fp8 tensorwise", "fp8 rowwise")
    rows = {"plain": step_of_layers({})}
    return timed(
        rows
        | {f"{kind}, compiled": step_of_layers(PRECISIONS[kind], compiles=True) for kind in kinds},
        rounds,
    )


def recomputed(rounds: int) -> dict[str, Any]:
    """Time the same in bfloat16 with each way to compute activations again."""
    memory = {
        "full": hfscale.MemoryConfig(recompute="full"),
        "elementwise": hfscale.MemoryConfig(recompute="elementwise"),
        "full, tiles of 2048": hfscale.MemoryConfig(recompute="full", tile_tokens=2048),
    }
    rows = {"none": step_of_layers({})}
    return timed(
        rows | {name: step_of_layers({"memory": given}) for name, given in memory.items()}, rounds
    )


def step_of_layers(
    given: dict[str, Any], dtype: torch.dtype = torch.bfloat16, compiles: bool = False
) -> Callable[[], None]:
    """Build the layers, and return what runs one step of them."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    if not GPU:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    config = LlamaConfig(**sizes, num_hidden_layers=4 if GPU else 1, vocab_size=1024)
    ids = torch.randint(0, 1024, (4, 2048 if GPU else 16), device=DEVICE)
    with DEVICE:  # values are drawn there
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = hfscale.parallelize(model, compile=compiles, **given).train()

    def step() -> None:
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        model.zero_grad()

    return step


def rounding(rounds: int) -> dict[str, Any]:
    """Time rounding 268 million float32 numbers to bfloat16 at random, beside a plain cast."""
    side = 1 << (14 if GPU else 5)
    wide = torch.randn(side, side, device=DEVICE)
    share, places = (
        wide.bfloat16(),
        [torch.arange(side, device=DEVICE) * each for each in (side, 1)],
    )
    return timed(
        {
            "cast": lambda: share.copy_(wide),
            "stochastic": lambda: write_rounded(share, wide, places, 12345),
            "stochastic, unfused": lambda: write_rounded(share, wide, places, 12345),
        },
        rounds,
    )


def profile(path: Path) -> None:
    """Write the kernels of a step of the compiled layers in 8 bits, by device time."""
    step = step_of_layers(PRECISIONS["fp8 tensorwise"], compiles=True)
    for _ in range(2):
        step()
    with torch.profiler.profile() as seen:
        step()
        if GPU:
            torch.cuda.synchronize()
    kind = "self_cuda_time_total" if GPU else "self_cpu_time_total"
    path.write_text(seen.key_averages().table(sort_by=kind, row_limit=60, max_name_column_width=90))


def main() -> None:
    """Measure each kind, and write the report after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("kernels_gpu.json"))
    parser.add_argument(
        "--profile", action="store_true", help="write the kernels of a step beside the report"
    )
    parser.add_argument(
        "--kinds",
        nargs="*",
        default=["ceilings", "head_and_loss", "layers", "compiled", "recomputed", "rounding"],
    )
    arguments = parser.parse_args()
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hfscale": hfscale.__version__,
    }
    device = torch.cuda.get_device_name() if GPU else platform.machine()
    report: dict[str, Any] = {"device": device, "versions": versions}
    for kind in arguments.kinds:
        report[kind] = globals()[kind](arguments.rounds)
        print(kind, json.dumps(report[kind], indent=1), flush=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()
    if arguments.profile:
        profile(arguments.out.with_suffix(".txt"))


if __name__ == "__main__":
    main()
