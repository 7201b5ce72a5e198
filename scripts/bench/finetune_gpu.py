"""LoRA and QLoRA of a Llama of 8 billion parameters on one GPU: hfscale against transformers with PEFT.

    python scripts/bench/finetune_gpu.py --out scripts/bench/results/finetune_gpu.json
    python scripts/bench/finetune_gpu.py --tiny        # on any device, with a tiny shape: shows that it runs

Random weights in bfloat16, built on the GPU; sequences of 2048 tokens; adapters of rank 16 on every projection. LoRA
steps with torch's fused AdamW, QLoRA (NF4, computing in bfloat16) with bitsandbytes' 8-bit AdamW. For QLoRA the weights
are written to ``--directory`` first (16 GB), since both sides quantize what they read. Each candidate is built, warmed
up, timed and dropped in turn; peaks are of torch's allocated bytes in the timed steps, the peak of loading is apart.
Losses before the first update are compared.
"""

import argparse
import gc
import importlib
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

import hfscale
from hfscale._compat.transformers.computing import enable_checkpointing

RECIPES = ("LoRA", "QLoRA")
SIDES = ("stock", "hfscale")
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


def build(
    recipe: str, side: str, arguments: argparse.Namespace, path: str, device: torch.device
) -> tuple[Any, Any]:
    """A model with adapters, and its optimizer."""
    adapters = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    eight = recipe == "QLoRA"
    if eight:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        kwargs["quantization_config"] = quantization
        if side == "hfscale":
            model = hfscale.from_pretrained(path, peft_config=adapters, **kwargs)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, device_map={"": device}, **kwargs)
    else:
        model = random_model(config_for(arguments.tiny), device)
        if side == "hfscale":
            model = hfscale.get_peft_model(hfscale.parallelize(model), adapters)
    if side == "stock":
        model = peft.get_peft_model(model, adapters)
    if arguments.checkpointing:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        enable_checkpointing(base)
        base.enable_input_require_grads()
    model.train()
    if side == "hfscale":
        return model, hfscale.create_optimizer(
            model, "adamw_8bit" if eight else "adamw_torch_fused", lr=1e-4
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if eight:
        import bitsandbytes

        return model, bitsandbytes.optim.AdamW8bit(trained, lr=1e-4, weight_decay=0.0)
    return model, torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True)


def measure(
    recipe: str, side: str, arguments: argparse.Namespace, path: str, device: torch.device
) -> dict[str, Any]:
    """Tokens per second, peaks in bytes, and the loss before the first update."""
    config = config_for(arguments.tiny)
    _reset_peak(device)
    start = time.perf_counter()
    model, optimizer = build(recipe, side, arguments, path, device)
    _synchronize(device)
    building = time.perf_counter() - start
    building_peak = _peak(device)
    sequence = 32 if arguments.tiny else arguments.sequence
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (arguments.batch, sequence), generator=generator).to(
        device
    )
    seconds: list[float] = []
    losses: list[float] = []
    for index in range(arguments.rounds + 3):
        if index == 3:
            _reset_peak(device)
        _synchronize(device)
        start = time.perf_counter()
        if side == "hfscale":
            loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        else:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(device)
        losses.append(loss.item())
        if index >= 3:
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return {
        "recipe": recipe,
        "side": side,
        "seconds": round(median, 4),
        "tokens per second": round(ids.numel() / median, 1),
        "peak bytes": _peak(device),
        "seconds to build": round(building, 1),
        "peak bytes while built": building_peak,
        "first loss": losses[0],
        "last loss": losses[-1],
    }


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
    """Ratios of hfscale to stock, by recipe.

    Raises:
        SystemExit: first losses differ.
    """
    found: dict[str, Any] = {}
    for recipe in RECIPES:
        of = {run["side"]: run for run in runs if run["recipe"] == recipe}
        if len(of) < len(SIDES):
            continue
        stock = of["stock"]
        ours = of["hfscale"]
        if recipe == "LoRA" and abs(stock["first loss"] - ours["first loss"]) > TOLERANCE:
            raise SystemExit(
                f"{recipe}: first losses differ: {stock['first loss']} and {ours['first loss']}"
            )
        found[f"{recipe}: tokens per second, hfscale / stock"] = round(
            stock["seconds"] / ours["seconds"], 3
        )
        if stock["peak bytes"]:
            found[f"{recipe}: peak memory, hfscale / stock"] = round(
                ours["peak bytes"] / stock["peak bytes"], 3
            )
    return found


def main() -> None:
    """Measure all candidates and write one report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute layers in the backward pass"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny shape, on whatever device there is"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where the weights for QLoRA are written; temporary by default",
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.tiny:
        raise SystemExit(
            "a model of 8 billion parameters needs a CUDA device: pass --tiny to try the script without"
        )
    if device.type == "cpu":
        torch.set_num_threads(1)  # tiny products
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as path:
        if "QLoRA" in arguments.recipes:
            random_model(config_for(arguments.tiny), device).save_pretrained(path)
        for recipe in arguments.recipes:
            for side in SIDES:
                runs.append(measure(recipe, side, arguments, path, device))
                print(json.dumps(runs[-1], indent=1), flush=True)
                if arguments.out:  # should a later one fail, or the time run out
                    arguments.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
                _reset_peak(device)
    libraries = [torch, transformers, peft, hfscale]
    if "QLoRA" in arguments.recipes:
        libraries.append(importlib.import_module("bitsandbytes"))
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {library.__name__: library.__version__ for library in libraries},
        "batch": arguments.batch,
        "sequence": 32 if arguments.tiny else arguments.sequence,
        "checkpointing": arguments.checkpointing,
        "runs": runs,
        **compare(runs),
    }
    print(json.dumps({key: value for key, value in report.items() if "/" in key}, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
