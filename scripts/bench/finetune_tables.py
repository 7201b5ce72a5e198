"""Print the tables of docs/benchmarks.md from the counts of ``finetune_counts.py``.

python scripts/bench/finetune_tables.py scripts/bench/results/finetune_counts.json
"""

import json
import sys
from pathlib import Path
from typing import Any

MOVED = "bytes a token beside base products"
KEPT = "kept bytes a token"
SIDES = ("hfscale", "hfscale, pieces", "hfscale, elementwise", "hfscale, compiled, pieces")
ON = ("H100", "H200", "A100", "B200", "RTX 4090", "RTX 5090")


def main() -> None:
    """Print ratios to stock by recipe and family, all sides of Llama, and what the model says."""
    results: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    for name, sides in results.items():
        stock = sides["stock"]
        cells = [of(sides.get(side), stock) for side in SIDES]
        ours = sides["hfscale"]
        for kind in ("float32 copies", "copies launched"):
            cells.append(f"{stock[kind]:.0f}, {ours[kind]:.0f}")
        recipe, _, family = name.partition(" ")
        print(f"| {'LoRA' if recipe == 'lora' else 'QLoRA'}, {family} | {' | '.join(cells)} |")
    for name in ("lora llama", "qlora llama"):
        sides = dict(results[name])
        modelled = sides.pop("model")
        print()
        for side, counts in sides.items():
            dequantized = f"{counts['dequantizations']:.0f}" if counts["dequantizations"] else ""
            print(f"| {side} | {of(counts, sides['stock'])} | {dequantized} |")
        print()
        for side, found in modelled.items():
            times = [str(found.get(f"1 x 2048: ms on {gpu}", "")) for gpu in ON]
            sizes = [str(found[f"{shape}: GiB"]) for shape in ("1 x 2048", "1 x 8192")]
            print(f"| {name}, {side} | {' | '.join((*times, *sizes))} |")


def of(counts: dict[str, float] | None, stock: dict[str, float]) -> str:
    """Return launches, bytes moved and bytes kept over stock's."""
    if counts is None:
        return ""
    return ", ".join(f"{counts[each] / stock[each]:.2f}" for each in ("launches", MOVED, KEPT))


if __name__ == "__main__":
    main()
