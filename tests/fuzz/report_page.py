"""Counts of many verdicts, as a page: pure."""

from collections import Counter
from collections.abc import Sequence

from .draw import Draw
from .judge import OUTCOMES, Verdict

Judged = Sequence[tuple[Draw, Verdict]]


def kind_of_layout(draw: Draw) -> str:
    """``tp x pp``, without sizes."""
    axes = [
        axis
        for axis in ("tp", "pp", "dp_shard", "dp_replicate", "cp", "ep")
        if draw.layout.get(f"{axis}_size", 1) > 1
    ]
    return " x ".join(axes) or "one process"


def summary(judged: Judged) -> str:
    """``812 equal, 150 refused, ...``."""
    counts = Counter(verdict.outcome for _, verdict in judged)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)


def page(judged: Judged, seed: int) -> str:
    """``docs/fuzz.md``."""
    sections = [
        ("layout", [kind_of_layout(draw) for draw, _ in judged]),
        ("schedule", [str(d.layout.get("pipeline_schedule", "-")) for d, _ in judged]),
        ("entry point", [draw.entry for draw, _ in judged]),
        ("weights", [_precision(draw) for draw, _ in judged]),
        ("on top", [_on_top(draw) for draw, _ in judged]),
        ("optimizer", [draw.optimizer for draw, _ in judged]),
    ]
    lines = [_HEAD, f"Seed {seed}, {len(judged)} draws: {summary(judged)}.", _DEFINITIONS, ""]
    for title, names in sections:
        lines += _table(title, names, judged)
    reasons = Counter(verdict.kind for _, verdict in judged if verdict.outcome == "refused")
    lines += ["| refused: when, and why | draws |", "|---|---|"]
    lines += [
        f"| {reason.replace('|', '/')} | {count} |" for reason, count in reasons.most_common()
    ]
    return "\n".join(lines) + "\n"


_NAMED = ("compress_activations", "stochastic_rounding")

_HEAD = """# Random layouts

Written by `scripts/layout_fuzz.py`. A random run (a draw) has a random model type, config, layout, schedule,
batch, precision, optimizer and entry point, with or without adapters. It is compared with plain transformers (PEFT,
bitsandbytes) in one process with the same weights.

- A run is `equal` if the loss of every step, gradients, clipped norm, weights and saved checkpoint agree with one
  process to 1e-9 in float64. A run in another dtype is `equal` if its results are as close to those of stock code
  in float64 as those of stock code in the same dtype (tests/fuzz/measures.py). One process cannot reproduce dropout
  and delayed updates, so in runs with these the ranks are compared with one another. Options that round are
  compared with one process that rounds in the same way (fp8 in float64, loss scales and skipped steps), or may
  differ by as much as one process does (activations in 8 bits, gradients in 16). PowerSGD's gradients must be
  projections, with the accumulated errors included.
- A run is `refused` if hfscale raises an error that names the cause, before anything is trained.
- A run is `stock` if stock code cannot train its config in one process.
- `late`, `wrong`, `crash` and `hang` are defects of hfscale. A run is `late` if an error that the plan could have
  raised before training comes only in the first step.

    python scripts/layout_fuzz.py --seed 1 --draws 1000 --jobs 2
    python scripts/layout_fuzz.py --seed 1 --only 17 --shrink      # one draw again, made as small as it still fails
"""

_DEFINITIONS = """A draw is a random run, compared with one process of plain transformers: refused if hfscale raises an
error before training, stock if plain transformers cannot train it; late, wrong, crash and hang are defects."""


def _precision(draw: Draw) -> str:
    return (
        draw.dtype
        if draw.mixed_precision == "no"
        else f"{draw.dtype}, computes in {draw.mixed_precision}"
    )


def _on_top(draw: Draw) -> str:
    what = [draw.quantize or "", "LoRA" if draw.peft else "", "frozen" if draw.frozen else ""]
    what += ["routing losses" if draw.routing else "", "resumed" if draw.resume else ""]
    what += [
        draw.compression if draw.compression != "no" else "",
        *(name for name in _NAMED if name in draw.levers),
    ]
    return ", ".join(name for name in what if name) or "-"


def _table(title: str, names: Sequence[str], judged: Judged) -> list[str]:
    lines = [f"| {title} | {' | '.join(OUTCOMES)} |", "|---" * (len(OUTCOMES) + 1) + "|"]
    for name, _ in Counter(names).most_common():
        counts = Counter(
            verdict.outcome
            for other, (_, verdict) in zip(names, judged, strict=True)
            if other == name
        )
        lines.append(f"| {name} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |")
    return [*lines, ""]
