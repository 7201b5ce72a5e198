"""Runs of one recipe in several layouts, beside each other: losses, what a rank holds, time of a step.

python scripts/side_by_side.py runs/demo-compare-1 runs/demo-compare-2
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from hfscale import ParallelConfig, memory_estimate, plan
from hfscale.plan.columns import aligned
from hfscale.plan.table import human
from hfscale.recipes.batch_sizes import of_one_microbatch
from hfscale.recipes.read import load_recipe
from hfscale.recipes.run import config_of
from hfscale.recipes.schema import PretrainRecipe


def main() -> None:
    runs = list(map(Path, sys.argv[1:]))
    print(describe([column(run) for run in runs]))


def column(run: Path) -> dict[str, Any]:
    """What a run logged, and what a rank of it holds."""
    recipe = load_recipe(PretrainRecipe, run / "recipe.yaml")
    layout = ParallelConfig(**recipe.parallel)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if "loss" in record]
    held = memory_estimate(plan(config_of(recipe), layout), **of_one_microbatch(recipe, layout))
    return {
        "layout": layout.describe(),
        "loss": {record["step"]: record["loss"] for record in training},
        "grad_norm": training[-1]["grad_norm"],
        "validation": [
            record["validation_loss"] for record in records if "validation_loss" in record
        ][-1],
        "states": held.weights + held.gradients + held.optimizer,
        "activations": held.activations,
        "seconds": training[-1]["seconds"] / training[-1]["step"],
    }


def describe(columns: list[dict[str, Any]]) -> str:
    """A table, a column for each run."""
    rows = [
        [f"loss until step {step}", *(f"{c['loss'][step]:.6f}" for c in columns)]
        for step in columns[0]["loss"]
    ]
    rows += [
        ["gradient norm, last step", *(f"{c['grad_norm']:.6f}" for c in columns)],
        ["validation loss", *(f"{c['validation']:.6f}" for c in columns)],
        ["perplexity", *(f"{math.exp(c['validation']):.2f}" for c in columns)],
        ["weights, gradients, optimizer of a rank", *(human(c["states"]) for c in columns)],
        ["activations of a rank", *(human(c["activations"]) for c in columns)],
        ["seconds per step", *(f"{c['seconds']:.2f}" for c in columns)],
    ]
    return "\n".join(aligned([["", *(c["layout"] for c in columns)], *rows], ruled=True))


if __name__ == "__main__":
    main()
