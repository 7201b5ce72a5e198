"""Write the tables of docs/memory.md that compare what is counted with the estimate, for every lever over every axis.

python scripts/memory_cells.py [--models NAME ...] [--levers NAME ...] [--axes NAME ...]

Every cell trains a small model for a step on CPU processes (:mod:`memory_measured`). The number is the estimate over
what was counted, of the rank where it is furthest off: of everything, and of activations alone. Numbers are kept in
scripts/bench/results; all of them are on the page.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from memory_measured import Case, comparable, estimated, gpt2, llama, mixture, seen
from memory_table import AXES, LEVERS, PAGE, reason
from transformers import PreTrainedConfig

from hfscale.testing import RankPool

RESULTS = Path(__file__).parent / "bench" / "results" / "memory_cells.json"
BEGIN = "<!-- written by scripts/memory_cells.py -->"
END = "<!-- end of cells -->"
ROWS = 4
LENGTH = 72
_LLAMAS = "Llama, hidden 256"
MODELS: dict[str, tuple[str, Callable[[], PreTrainedConfig]]] = {
    "llama 256": (_LLAMAS, partial(llama, 256)),
    "mixture 256": ("Mixture of four experts, hidden 256", partial(mixture, 256)),
    "gpt2 256": ("GPT-2, hidden 256", partial(gpt2, 256)),
}
"""Name -> the table that its cells are in, and its config."""


def case_of(lever: dict[str, Any], axes: dict[str, Any], config: PreTrainedConfig) -> Case:
    """A cell's step: small tensors go elsewhere, too, and a budget has some layers computed again."""
    memory = dict(lever.get("memory", {}))
    if memory.get("recompute") == "8GiB":
        layers = config.num_hidden_layers
        hidden = config.hidden_size
        # Others' layers are chosen by an estimate from above.
        units = 10 if config.model_type == "llama" else 30
        memory["recompute"] = f"{ROWS * LENGTH * hidden * 4 * units * layers // 1024}KiB"
    memory |= {
        name: "1KiB" for name in ("offload_activations", "compress_activations") if name in memory
    }
    eager = {"attention": "eager"} if memory.get("recompute") == "selective" else {}
    flush = axes.get("pipeline_schedule") != "pipedream"
    microbatches = 2 if "pp_size" in axes and flush else 1
    return Case(config, {**lever, "memory": memory, **eager}, axes, ROWS, LENGTH, microbatches)


def ratios(pool: RankPool, case: Case) -> tuple[float, float]:
    """Estimate over counted bytes, of everything and of activations, of the rank where it is furthest off."""
    pairs = []
    for rank in pool.run(seen, case):
        total, kept = comparable(case, estimated(case, rank.stage, rank.chosen), rank.head)
        pairs.append((total / rank.total, kept / rank.bytes["activations"]))
    total, kept = (
        max(column, key=lambda ratio: abs(ratio - 1)) for column in zip(*pairs, strict=True)
    )
    return round(total, 4), round(kept, 4)


def table(results: dict[str, Any], title: str) -> str:
    """In Markdown, of the model of that title where it is further off."""
    found = [results[name] for name, (of, _) in MODELS.items() if of == title and name in results]
    axes = [
        axis for axis in AXES if any(axis in cells for each in found for cells in each.values())
    ]
    lines = [f"{title}:", "", f"| | {' | '.join(axes)} |", "|---" * (len(axes) + 1) + "|"]
    for name in (name for name in LEVERS if any(name in each for each in found)):
        cells = []
        for axis in axes:
            every = [each[name][axis] for each in found if axis in each.get(name, {})]
            worst = [
                max(column, key=lambda ratio: abs(ratio - 1)) for column in zip(*every, strict=True)
            ]
            cells.append(f"{worst[0]:.3f}, {worst[1]:.3f}" if worst else "")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> str:
    """One for each kind of model."""
    return "\n\n".join(
        table(results, title) for title in dict.fromkeys(title for title, _ in MODELS.values())
    )


def main() -> None:
    """Measure, keep, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--levers", nargs="*", default=list(LEVERS))
    parser.add_argument("--axes", nargs="*", default=list(AXES))
    parser.add_argument("--missing", action="store_true", help="only what was not measured yet")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    torch.set_num_threads(1)
    with RankPool(2, timeout=600) as pool:
        for model in given.models:
            config = MODELS[model][1]()
            for axis in given.axes:
                for name in given.levers:
                    if reason(LEVERS[name], AXES[axis]) or (
                        axis == "ep" and not hasattr(config, "num_experts")
                    ):
                        continue
                    if "elementwise" in name and hasattr(config, "num_experts"):
                        continue  # the host's experts keep more on CPUs than their kernels on GPUs, which are estimated
                    if axis == "pp, pipedream" and config.tie_word_embeddings:
                        continue  # refused: two stages would step one weight
                    if given.missing and axis in results.get(model, {}).get(name, {}):
                        continue
                    found = ratios(pool, case_of(LEVERS[name], AXES[axis], config))
                    results.setdefault(model, {}).setdefault(name, {})[axis] = found
                    print(f"{model}: {name} over {axis}: {found[0]:.3f} {found[1]:.3f}", flush=True)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
