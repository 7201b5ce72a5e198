"""Predictions of ``hfscale calibrate`` and ``hfscale.estimate`` against steps of this machine.

    python scripts/bench/predicted.py [--rounds 5] [--seconds 1.0] [--out scripts/bench/results/predicted.json]

One process measures the machine; then two processes with one thread each take a step of every layout in turn, so that
all see the same machine. Compared are seconds of a step, seconds of the processor that the busiest rank computes for
(what others run on the machine does not lengthen them), and bytes that layers keep, counted by saved-tensor hooks.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig
from report import write_report
from transformers import LlamaConfig

import hfscale
from hfscale.extras.bench.collectives import measure as measure_collectives
from hfscale.extras.calibrate.calibrate import Sizes, calibrate
from hfscale.features.memory.saved import count_saved
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of

SEQUENCE = 128
ROWS = 4
CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
}
CONFIG |= {"num_attention_heads": 8, "num_key_value_heads": 8}
# Layout, microbatches, whether adapters train.
CASES: dict[str, tuple[dict[str, Any], int, bool]] = {
    "one": ({}, 1, False),
    "one, LoRA": ({}, 1, True),
    "tp2": ({"tp_size": 2}, 1, False),
    "tp2, sequence": ({"tp_size": 2, "sequence_parallel": True}, 1, False),
    "tp2, LoRA": ({"tp_size": 2}, 1, True),
    "pp2": ({"pp_size": 2, "num_microbatches": 4}, 4, False),
    "dp2": ({"dp_replicate_size": 2}, 1, False),
    "fsdp2": ({"dp_shard_size": 2}, 1, False),
}
WAITS = ("exchange", "handover", "bubble", "data", "other")
_state: dict[str, Any] = {}


def adapters() -> LoraConfig:
    """Of all linear layers."""
    return LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def calibration(seconds: float, link: tuple[float, float]) -> dict[str, Any]:
    """What ``hfscale calibrate`` writes of this machine, with one thread."""
    return calibrate("this machine", torch.device("cpu"), link, Sizes(seconds=seconds))


def link_of_ranks(seconds: float) -> tuple[float, float]:
    """Bytes per second of a large all-reduce, and seconds of a small one."""
    found = measure_collectives(torch.device("cpu"), [4 << 10, 1 << 20, 16 << 20], seconds)
    reduced = sorted(
        (each for each in found if each.collective == "all-reduce"), key=lambda each: each.size
    )
    return reduced[-1].bus_bandwidth, reduced[0].seconds


def build(case: str) -> int:
    """A model and its optimizer; the bytes that its layers and its last norm keep in a first step."""
    sizes, microbatches, lora = CASES[case]
    model = hfscale.from_config(
        LlamaConfig(**CONFIG),
        parallel=hfscale.ParallelConfig(**sizes),
        dtype=torch.float32,
        peft_config=adapters() if lora else None,
    ).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = ROWS // microbatches
    generator = torch.Generator().manual_seed(hfscale.batch_rank(model))
    ids = torch.randint(CONFIG["vocab_size"], (microbatches, rows, SEQUENCE), generator=generator)
    batches = [{"input_ids": one, "labels": one} for one in ids]
    _state[case] = model, torch.optim.AdamW(trained, lr=1e-4, fused=True), batches
    plan = runtime_of(model).plan
    with count_saved(model, plan.layers, plan.head) as saved:
        hfscale.train_step(model, batches)
    return saved.layers + saved.around


def step(case: str) -> tuple[float, float]:
    """Seconds of a step, and of those what this rank's processor computed for."""
    model, optimizer, batches = _state[case]
    start = time.perf_counter()
    busy = time.thread_time()
    hfscale.train_step(model, batches)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start, time.thread_time() - busy


def predicted(case: str, hardware: str) -> Any:
    """What is estimated."""
    sizes, microbatches, lora = CASES[case]
    return hfscale.estimate(
        LlamaConfig(**CONFIG),
        hfscale.ParallelConfig(**sizes),
        hardware,
        sequence_length=SEQUENCE,
        batch_size=ROWS // microbatches,
        num_microbatches=microbatches,
        dtype=torch.float32,
        peft_config=adapters() if lora else None,
    )


def compare(
    case: str, times: list[list[tuple[float, float]]], kept: list[int], hardware: str
) -> dict[str, Any]:
    """Medians of the rounds beside the estimate.

    Args:
        times: per round and rank, seconds of the step, and of the processor.
        kept: per rank, bytes of activations.
    """
    found = predicted(case, hardware)
    seconds = statistics.median(max(whole for whole, _ in ranks) for ranks in times)
    busy = statistics.median(max(own for _, own in ranks) for ranks in times)
    terms = found.time.terms
    computed = found.seconds - sum(terms[name] for name in WAITS)
    stages = [stage.memory.activations for stage in found.stages]
    counted = max(kept)
    return {
        "case": case,
        "seconds": {"measured": round(seconds, 4), "predicted": round(found.seconds, 4)},
        "processor": {"measured": round(busy, 4), "predicted": round(computed, 4)},
        "activations": {"counted": counted, "predicted": max(stages)},
        "off": {
            "seconds": round(found.seconds / seconds - 1, 3),
            "processor": round(computed / busy - 1, 3),
            "activations": round(max(stages) / counted - 1, 3),
        },
        "terms": {name: round(value, 4) for name, value in terms.items() if value},
    }


def main() -> None:
    """Measure, predict, and print one report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of each measurement of the machine"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pools = {world: RankPool(world, timeout=900) for world in (1, 2)}
    worlds = {
        case: max(1, hfscale.ParallelConfig(**sizes).total_size)
        for case, (sizes, _, _) in CASES.items()
    }
    link = pools[2].run(link_of_ranks, arguments.seconds / 10)[0]
    document = pools[1].run(calibration, arguments.seconds, link)[0]
    print(json.dumps(document, indent=1), flush=True)
    kept = {case: pools[worlds[case]].run(build, case) for case in CASES}
    times: dict[str, list[Any]] = {case: [] for case in CASES}
    for index in range(arguments.rounds + 1):
        for case in CASES:
            taken = pools[worlds[case]].run(step, case)
            if index:  # a round of warm-up
                times[case].append(taken)
    for pool in pools.values():
        pool.close()
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder) / "machine.json"
        machine.write_text(json.dumps(document))
        results = [compare(case, times[case], kept[case], str(machine)) for case in CASES]
    middle = {
        name: statistics.median(abs(each["off"][name]) for each in results)
        for name in ("seconds", "processor", "activations")
    }
    for each in results:
        print(json.dumps(each), flush=True)
    print("median off:", json.dumps(middle))
    summary = {
        "median off": middle,
        "sizes": asdict(Sizes(seconds=arguments.seconds)),
        "machine": document,
    }
    write_report(arguments.out, [summary, *results], torch, transformers, hfscale)


if __name__ == "__main__":
    main()
