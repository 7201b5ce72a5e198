"""LoRA and QLoRA of a Llama of 8 billion parameters on one GPU: hfscale against transformers with PEFT.

    python scripts/bench/finetune_gpu.py --out scripts/bench/results/finetune_gpu.json
    python scripts/bench/finetune_gpu.py --tiny        # on any device, with a tiny shape: shows that every side runs

Random weights in bfloat16, built on the GPU; adapters of rank 16 on every projection. LoRA steps with torch's fused
AdamW, QLoRA (NF4, computing in bfloat16) with bitsandbytes' 8-bit AdamW. For QLoRA the weights are written to
``--directory`` first (16 GB), since both sides quantize what they read. Baselines are stock code in a plain loop, under
autocast (a Trainer's ``bf16=True``), and with checkpointing besides (TRL's defaults). Candidates are built, warmed up,
timed at each size of batch and dropped in turn, in this order and then backwards, so that a clock that changes changes
all of them; seconds are the medians of both. Peaks are of torch's allocated bytes in the timed steps; what does not fit
is said. The first loss, before any update, is compared. ``--seconds`` starts no candidate later than that.
"""

import argparse
import gc
import importlib
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import hfscale
from hfscale import MemoryConfig
from hfscale._compat.transformers.computing import enable_checkpointing

RECIPES = ("LoRA", "QLoRA")
SIDES: dict[str, frozenset[str]] = {  # how each differs from its library's plain loop
    "stock, plain": frozenset(),
    "stock, bf16": frozenset({"autocast"}),
    "stock, TRL": frozenset({"autocast", "checkpointed"}),
    "hfscale": frozenset(),
    "hfscale, compiled": frozenset({"compiled"}),
    "hfscale, elementwise": frozenset({"elementwise"}),
    "hfscale, checkpointed": frozenset({"checkpointed"}),
}
BASELINES = tuple(side for side in SIDES if side.startswith("stock"))
SHAPES = ((1, 2048), (4, 2048), (1, 8192))
TINY = ((1, 32), (4, 32), (1, 64))
WARM = 3
CLASSES = {  # of kernels, by parts of their names, the first that is found
    "attention": ("flash", "fmha", "attention", "cudnn_generated"),
    "dequantization": ("dequantize", "kDequantize"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "splitK", "_mm"),
    "compiled": ("triton",),
}
TOLERANCE = 2e-2  # of first losses, in bfloat16


def config_for(tiny: bool) -> LlamaConfig:
    """Llama 3.1 8B's shape."""
    sizes = (128, 256, 2, 4, 2, 512) if tiny else (4096, 14336, 32, 32, 8, 128256)
    hidden, intermediate, layers, heads, key_value_heads, vocabulary = sizes
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
    )


def random_model(config: LlamaConfig, device: torch.device) -> Any:
    """The stock model with the same random weights every time, built on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )


def build(recipe: str, side: str, tiny: bool, path: str, device: torch.device) -> tuple[Any, Any]:
    """A model with adapters, and its optimizer."""
    adapters = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    eight = recipe == "QLoRA"
    how = SIDES[side]
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    if eight:
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    if side not in BASELINES:
        again = {"elementwise": "elementwise", "checkpointed": "full"}
        levers = {
            "memory": MemoryConfig(
                recompute=next((again[each] for each in how & {*again}), "none")
            ),
            # Without Triton (--tiny), a backend that shows that layers are traced.
            "compile": ("auto" if device.type == "cuda" else "aot_eager")
            if "compiled" in how
            else False,
        }
        if eight:
            model = hfscale.from_pretrained(path, peft_config=adapters, **kwargs, **levers)
        else:
            plain = random_model(config_for(tiny), device)
            model = hfscale.get_peft_model(hfscale.parallelize(plain, **levers), adapters)
        name = "adamw_8bit" if eight else "adamw_torch_fused"
        return model.train(), hfscale.create_optimizer(model, name, lr=1e-4)
    if eight:
        base = AutoModelForCausalLM.from_pretrained(path, device_map={"": device}, **kwargs)
    else:
        base = random_model(config_for(tiny), device)
    if "checkpointed" in how:
        enable_checkpointing(base)
        base.enable_input_require_grads()
    model = peft.get_peft_model(base, adapters).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if eight:
        import bitsandbytes

        return model, bitsandbytes.optim.AdamW8bit(trained, lr=1e-4, weight_decay=0.0)
    return model, torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)


def measure(
    recipe: str, side: str, arguments: argparse.Namespace, path: str, device: torch.device
) -> list[dict[str, Any]]:
    """Seconds, peaks in bytes and losses at each size of batch."""
    _reset_peak(device)
    start = time.perf_counter()
    model, optimizer = build(recipe, side, arguments.tiny, path, device)
    _synchronize(device)
    building = {
        "seconds to build": round(time.perf_counter() - start, 1),
        "peak bytes while built": _peak(device),
    }
    words = config_for(arguments.tiny).vocab_size
    found = []
    for rows, length in TINY if arguments.tiny else SHAPES:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, words, (rows, length), generator=generator).to(device)
        named = {"recipe": recipe, "side": side, "rows": rows, "length": length, **building}
        try:
            found.append(named | steps(model, optimizer, side, ids, arguments.rounds))
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            found.append({**named, "fits": False})
    return found


def steps(model: Any, optimizer: Any, side: str, ids: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Steps on one batch: the first is apart, since it compiles, and one more is taken apart by kernels."""
    device = ids.device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled="autocast" in SIDES[side])

    def step() -> Any:
        if side not in BASELINES:
            loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        else:
            with autocast:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    seconds: list[float] = []
    losses: list[float] = []
    for index in range(rounds + WARM):
        if index == WARM:
            _reset_peak(device)
        _synchronize(device)
        start = time.perf_counter()
        loss = step()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    median = statistics.median(seconds[WARM:])
    return {
        "fits": True,
        "seconds": round(median, 4),
        "tokens per second": round(ids.numel() / median, 1),
        "peak bytes": _peak(device),
        "seconds of the first step": round(seconds[0], 2),
        "first loss": losses[0],
        "last loss": losses[-1],
        **(by_kernel(step) if device.type == "cuda" else {}),
    }


def by_kernel(step: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of a step's kernels by class, and from its beginning to the first of them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        step()
        torch.cuda.synchronize()
    total: dict[str, float] = {}
    kernels = [each for each in seen.events() if "CUDA" in str(each.device_type)]
    for kernel in kernels:
        parts = CLASSES.items()
        kind = next((k for k, names in parts if any(n in kernel.name for n in names)), "others")
        total[kind] = total.get(kind, 0.0) + kernel.time_range.elapsed_us() / 1000
    first = min(each.time_range.start for each in kernels)
    begin = min(each.time_range.start for each in seen.events())
    found = {f"ms of {kind}": round(value, 2) for kind, value in total.items()}
    return {**found, "ms before the first kernel": round((first - begin) / 1000, 2)}


def _reset_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of every side to each baseline, by recipe and size of batch: tokens per second, and peak memory.

    Raises:
        SystemExit: first losses of LoRA differ.
    """
    sides: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        of = sides.setdefault((run["recipe"], run["rows"], run["length"]), {})
        of.setdefault(run["side"], []).append(run)
    found: dict[str, Any] = {}
    for (recipe, rows, length), of in sides.items():
        fitting = {side: each for side, each in of.items() if all(run["fits"] for run in each)}
        first = {round(run["first loss"], 6) for each in fitting.values() for run in each}
        if recipe == "LoRA" and first and max(first) - min(first) > TOLERANCE:
            raise SystemExit(f"{recipe}, {rows} x {length}: first losses differ: {sorted(first)}")
        seconds = {k: statistics.median(run["seconds"] for run in v) for k, v in fitting.items()}
        for baseline in filter(fitting.__contains__, BASELINES):
            for side in (each for each in fitting if each != baseline):
                name = f"{recipe}, {rows} x {length}: {side} / {baseline}"
                found[f"{name}, tokens per second"] = round(seconds[baseline] / seconds[side], 3)
                peaks = [of[each][0]["peak bytes"] for each in (side, baseline)]
                if all(peaks):
                    found[f"{name}, peak memory"] = round(peaks[0] / peaks[1], 3)
    return found


def main() -> None:
    """Measure all candidates and write one report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=tuple(SIDES))
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny shape, on whatever device there is"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no candidate later than this"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where the weights for QLoRA are written; temporary by default",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        raise SystemExit(
            "a model of 8 billion parameters needs a CUDA device: pass --tiny to try the script without"
        )
    if device.type == "cpu":
        torch.set_num_threads(1)  # tiny products
    libraries = [torch, transformers, peft, hfscale]
    if "QLoRA" in arguments.recipes:
        libraries.append(importlib.import_module("bitsandbytes"))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {library.__name__: library.__version__ for library in libraries},
        "runs": [],
    }
    with tempfile.TemporaryDirectory(dir=arguments.directory) as path:
        if "QLoRA" in arguments.recipes:
            random_model(config_for(arguments.tiny), device).save_pretrained(path)
        for recipe in arguments.recipes:
            for side in (*arguments.sides, *reversed(arguments.sides)):
                if time.perf_counter() - begin > arguments.seconds:
                    continue
                report["runs"] += measure(recipe, side, arguments, path, device)
                print(json.dumps(report["runs"][-len(SHAPES) :], indent=1), flush=True)
                if arguments.out:  # should a later one fail, or the time run out
                    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
                torch.compiler.reset()
                _reset_peak(device)
    report |= compare(report["runs"])
    print(json.dumps({key: value for key, value in report.items() if "/" in key}, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
