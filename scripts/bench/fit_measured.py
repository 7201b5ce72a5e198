"""Fit constants of the time model on steps of hfscale on one GPU: scripts/bench/results/*_gpu.json and *_h200.json.

    python scripts/bench/fit_measured.py          # writes "own" of hfscale/cost/model/constants.json

A descent over one constant at a time from those of other code; what the steps leave open stays as it was. Prints each
step as measured, and as estimated.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import LlamaConfig

import hfscale
from hfscale.cost.model.job import Job, job_of, places_of
from hfscale.cost.model.machines_known import (
    CONSTANTS,
    Constants,
    find_machine,
    fitted,
    read_constants,
)
from hfscale.cost.model.model_shape import ModelShape, shape_of_plan
from hfscale.cost.model.step_time import head_seconds, part_seconds, stage_seconds, step_time

RESULTS = Path(__file__).parent / "results"
FITTED = ("products", "elementwise", "loss_bytes", "step")
_HEADS: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8}
ONE = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    vocab_size=128256,
    tie_word_embeddings=True,
    **_HEADS,
)
EIGHT = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256, **_HEADS
)
FOUR = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, vocab_size=1024, **_HEADS
)
LORA = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


@dataclass(frozen=True)
class Step:
    """A step that was measured."""

    name: str
    hardware: str
    seconds: float
    config: LlamaConfig
    batch: int  # sequences of 2,048 tokens
    given: dict[str, Any]  # of the plan
    updates: bool = True  # whether the optimizer steps in it
    peak: float | None = None  # bytes that the allocator had at once

    def described(self) -> tuple[Any, ModelShape, Job]:
        """Return plan, shape and job."""
        plan = hfscale.plan(self.config, dtype=torch.bfloat16, **self.given)
        mixed = "mixed_precision" in self.given
        return (
            plan,
            shape_of_plan(plan, self.config),
            job_of(plan, sequence=2048, batch=self.batch, microbatches=1, mixed=mixed),
        )


def measured() -> Iterator[Step]:
    """Yield the steps of the committed results, uncompiled."""
    for name, hardware in (("gpu", "h100"), ("h200", "h200")):
        runs = json.loads((RESULTS / f"one_{name}.json").read_text())["runs"]["hfscale"]
        seconds = min(run["seconds"] for run in runs)
        peak = min(run["peak_bytes"] for run in runs)
        yield Step("1B", hardware, seconds, ONE, 4, {}, peak=peak)
        runs = json.loads((RESULTS / f"finetune_{name}.json").read_text())["runs"]
        run = next(run for run in runs if (run["recipe"], run["side"]) == ("LoRA", "hfscale"))
        yield Step(
            "8B, LoRA",
            hardware,
            run["seconds"],
            EIGHT,
            1,
            {"peft_config": LORA, "fused_adapters": False},  # as it was measured
            peak=run["peak bytes"],
        )
    found = json.loads((RESULTS / "kernels_h200.json").read_text())
    again = found["recomputed"]
    tiles = hfscale.MemoryConfig(recompute="full", tile_tokens=2048)
    ways = {name: hfscale.MemoryConfig(recompute=name) for name in ("none", "elementwise", "full")}
    for name, memory in {**ways, "full, tiles of 2048": tiles}.items():
        yield Step(
            f"4 layers, {name}", "h200", again[name]["ms"] / 1e3, FOUR, 4, {"memory": memory}, False
        )
    eight = found["layers"]["fp8 tensorwise"]["ms"] / 1e3
    yield Step("4 layers, fp8", "h200", eight, FOUR, 4, {"mixed_precision": "fp8"}, False)


def estimated(step: Step, constants: Constants, described: Any = None) -> float:
    """Return the seconds that the time model says of a step."""
    plan, shape, job = described or step.described()
    machine = find_machine(step.hardware)
    stages = stage_seconds(places_of(plan), part_seconds(shape, job, machine, constants))
    found = step_time(stages, [place.weights for place in places_of(plan)], job, machine, constants)
    return found.total - (0 if step.updates else found.update)


def main() -> int:
    """Fit, write, and print every step."""
    from fit_planner import descend  # beside this script, where only running it finds it

    steps = list(measured())
    known = [step.described() for step in steps]
    head = (
        json.loads((RESULTS / "kernels_gpu.json").read_text())["head_and_loss"]["hfscale"]["ms"]
        / 1e3
    )
    start = read_constants(CONSTANTS)

    def loss(found: dict[str, float]) -> float:
        constants = replace(start, **found)
        off = [
            estimated(step, constants, of) / step.seconds
            for step, of in zip(steps, known, strict=True)
        ]
        off.append(head_seconds(*known[0][1:], find_machine("h100"), constants).loss / head)
        return sum(math.log(each) ** 2 for each in off)

    found = descend({name: asdict(start)[name] for name in FITTED}, loss)
    document = json.loads(CONSTANTS.read_text())
    document["own"] = {name: float(f"{value:.4g}") for name, value in found.items()}
    CONSTANTS.write_text(json.dumps(document, indent=2) + "\n")
    fitted.cache_clear()
    print(document["own"])
    for step in steps:
        seconds = estimated(step, fitted())
        print(
            f"{step.name:32} {step.hardware} {step.seconds:.4f} {seconds:.4f} {seconds / step.seconds:.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
