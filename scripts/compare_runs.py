"""Validation losses of several runs on the same text, side by side: a table and a figure.

python scripts/compare_runs.py runs/demo-upcycle-dense runs/demo-upcycle --out runs/demo-upcycle/beside-dense.png
"""

import argparse
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hfscale.recipes.read import load_recipe
from hfscale.recipes.run_log import read_metrics
from hfscale.recipes.schema import FinetuneRecipe, Recipe, TrainingRecipe

COLOURS = ("#7a7a7a", "#1f4e8c", "#c2571a", "#3a7d44")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare the validation losses of runs on the same text."
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="directories of finished runs; the first is the reference",
    )
    parser.add_argument("--out", type=Path, help="a figure, such as runs/comparison.png")
    arguments = parser.parse_args()
    for run in arguments.runs:
        if not (run / "metrics.jsonl").is_file() or not (run / "recipe.yaml").is_file():
            sys.exit(f"{run} has no finished run (metrics.jsonl and recipe.yaml): train it first")
    recipes = [load_recipe(FinetuneRecipe, run / "recipe.yaml") for run in arguments.runs]
    if problem := difference(recipes):
        sys.exit(f"{problem}: these runs do not compare")
    curves = {run.name: losses(run) for run in arguments.runs}
    tokens = recipes[0].training.batch_size * recipes[0].data.sequence_length
    print(table(curves, tokens))
    if arguments.out:
        draw(curves, tokens, arguments.out)
        print(f"\n{arguments.out}")


def difference(recipes: list[Recipe]) -> str | None:
    """What keeps runs from being compared step by step."""
    for part in ("data", "training", "seed"):
        first, *others = (_without_saves(getattr(recipe, part)) for recipe in recipes)
        if any(other != first for other in others):
            return f"their recipes differ in {part}"
    return None


def _without_saves(part: Any) -> Any:
    """A run that was stopped and went on is the same run."""
    return (
        replace(part, save_every=None, resume=False) if isinstance(part, TrainingRecipe) else part
    )


def losses(run: Path) -> dict[int, float]:
    """Optimizer step -> validation loss."""
    _, evaluation = read_metrics(run / "metrics.jsonl")
    return {record["step"]: record["validation_loss"] for record in evaluation}


def table(curves: dict[str, dict[int, float]], tokens_per_step: int) -> str:
    """Markdown: a row per evaluation, a column per run, and how far the others are from the first."""
    first, *others = curves
    header = ["step", "tokens", first, *(text for name in others for text in (name, "difference"))]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for step in curves[first]:
        row = [f"{step}", f"{step * tokens_per_step:,}", f"{curves[first][step]:.4f}"]
        for name in others:
            row += [f"{curves[name][step]:.4f}", f"{curves[name][step] - curves[first][step]:+.4f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(curves: dict[str, dict[int, float]], tokens_per_step: int, target: Path) -> None:
    """Validation loss over tokens."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    for (name, curve), colour in zip(curves.items(), cycle(COLOURS), strict=False):
        tokens = [step * tokens_per_step / 1000 for step in curve]
        values = list(curve.values())
        label = f"{name} (ends at {values[-1]:.4f})"
        axes.plot(tokens, values, color=colour, lw=1.8, marker="o", ms=4, label=label)
    axes.set(xlabel="tokens trained on (thousands)", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main()
