"""Write the table of docs/memory.md that says what each lever holds in each layout, beside what it ideally would.

python scripts/memory_levers.py [--levers NAME ...]

A small Llama trains for a step on CPU processes; weights, adapters, gradients, the optimizer's state and what is kept
for the backward pass are counted, on the device and on the host. Ideally two ranks hold half of what one holds of the
same lever and batch. Seconds are the processor's, of steps in turn with those of the same layout without the lever: the
least of several over the least of several.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from memory_cells import HELD, counted_elsewhere, one_layer
from memory_table import PAGE
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.memory.report import count_saved, held_bytes
from hfscale.runtime import runtime_of
from hfscale.testing import RankPool

RESULTS = Path(__file__).parent / "bench" / "results" / "memory_levers.json"
BEGIN, END = "<!-- written by scripts/memory_levers.py -->", "<!-- end of levers -->"
ROWS, LENGTH, STEPS = 8, 32, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp_size": 2, "sequence_parallel": True, "sequence_regather": True},
    "dp_shard2": {"dp_shard_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
}
_LORA: dict[str, Any] = {"r": 8, "target_modules": "all-linear"}
LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "fp8": {"mixed_precision": "fp8"},
    "stochastic rounding": {"dtype": torch.bfloat16, "stochastic_rounding": True},
    "recompute full": {"memory": {"recompute": "full"}},
    "recompute every 2nd": {"memory": {"recompute": 2}},
    "offload activations": {"memory": {"offload_activations": "1KiB"}},
    "compress activations": {"memory": {"compress_activations": "1KiB"}},
    "offload optimizer": {"memory": {"offload_optimizer": True}},
    "8-bit optimizer": {"optimizer": "adamw_8bit"},
    "LoRA": {"lora": _LORA},
    "QLoRA": {"lora": _LORA, "quantized": True},
}
CONFIG = LlamaConfig(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=512,
    head_dim=64,
)


def built(lever: dict[str, Any], layout: dict[str, Any], path: str) -> tuple[Any, Any, str]:
    """A model in training, its optimizer, and the optimizer's name."""
    torch.manual_seed(0)
    lora = LoraConfig(**lever["lora"]) if "lora" in lever else None
    asked: dict[str, Any] = {
        "parallel": ParallelConfig(**layout),
        "memory": MemoryConfig(**lever.get("memory", {})),
        "mixed_precision": lever.get("mixed_precision", "no"),
        "dtype": lever.get("dtype", torch.float32),
        "peft_config": lora,
    }
    if "quantized" in lever:
        asked["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = hfscale.from_pretrained(path, **asked).train()
    name = lever.get("optimizer", "adamw_torch")
    rounding = {"stochastic_rounding": True} if "stochastic_rounding" in lever else {}
    return model, hfscale.create_optimizer(model, name, lr=1e-4, **rounding), name


def measured(lever: dict[str, Any], layout: dict[str, Any], path: str) -> dict[str, Any]:
    """Bytes by kind of this rank, the estimate of their sum, and seconds of a step over those without the lever."""
    runs = [built(each, layout, path) for each in ({}, lever)]
    rows = ROWS // (layout.get("dp_shard_size", 1))
    ids = torch.randint(3, 500, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    counts = [
        _counted(*run, ids, layout, bool(each.get("memory"))) for run, each in zip(runs, ({}, lever), strict=True)
    ]
    found = counts[1]
    if "recompute" in lever.get("memory", {}):
        found["counted"]["activations"] += counts[0]["layer"]
    least = [float("inf"), float("inf")]
    for _ in range(STEPS):
        for number, (model, optimizer, _) in enumerate(runs):
            begin = time.process_time()
            hfscale.train_step(model, {"input_ids": ids, "labels": ids})
            optimizer.step()
            optimizer.zero_grad()
            least[number] = min(least[number], time.process_time() - begin)
    return {"counted": found["counted"], "estimated": found["estimated"], "time": least[1] / least[0]}


def _counted(model: Any, optimizer: Any, name: str, ids: Any, layout: dict[str, Any], away: bool) -> dict[str, Any]:
    runtime = runtime_of(model)
    memory = runtime.options.memory
    elsewhere = away and bool(memory.offload_activations or memory.compress_activations)
    layers = () if elsewhere else runtime.plan.layers
    with (
        count_saved(runtime.model, layers, runtime.plan.head) as saved,
        counted_elsewhere(runtime, saved, elsewhere) as back,
        one_layer(runtime, saved) as left,
    ):
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        optimizer.step()
    held = asdict(held_bytes(model, optimizer))
    optimizer.zero_grad()
    microbatches = layout.get("num_microbatches", 1)
    found = hfscale.memory_estimate(model, name, tokens=ids.numel() // microbatches, num_microbatches=microbatches)
    weights = {planned.name: parameter for planned, parameter in runtime.parameters()}
    head = 2 * weights["lm_head.weight"].numel() if "lm_head.weight" in weights else 0
    mixed = runtime.options.mixed_precision != "no" and runtime.mesh.data_world == 1
    estimated = sum(found.kinds[kind] for kind in (*HELD, "activations")) + found.on_host
    counted = {**held, "activations": saved.around + saved.layers + back.layers}
    return {"counted": counted, "estimated": estimated + mixed * (found.gathered - head), "layer": max(left)}


def table(results: dict[str, Any]) -> str:
    """In Markdown: bytes over half of one rank's, the estimate over them, and the time of a step."""
    lines = [f"| | {' | '.join(LAYOUTS)} |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for name in (name for name in LEVERS if name in results):
        one = sum(results[name]["one"]["counted"].values())
        plain = sum(results["none"]["one"]["counted"].values())
        cells = []
        for layout in LAYOUTS:
            found = results[name][layout]
            total = sum(found["counted"].values())
            ideal = plain if layout == "one" else one / 2
            cells.append(f"{total / ideal:.3f}, {found['estimated'] / total:.3f}, {found['time']:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, keep, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levers", nargs="*", default=list(LEVERS))
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as path, RankPool(2) as two:
        torch.manual_seed(0)
        LlamaForCausalLM(CONFIG).save_pretrained(path)
        for name in given.levers:
            for layout, sizes in LAYOUTS.items():
                ranks = two.run(measured, LEVERS[name], sizes, path) if sizes else [measured(LEVERS[name], {}, path)]
                fullest = max(ranks, key=lambda rank: sum(rank["counted"].values()))
                results.setdefault(name, {})[layout] = fullest
                print(name, layout, fullest, flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
