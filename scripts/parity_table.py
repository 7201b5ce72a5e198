"""Run every tested family in every layout against one process and write the table in docs/parity.md.

python scripts/parity_table.py [--out docs/parity.md]

Each cell is the largest relative difference found, in float64 on gloo, in the loss, any gradient, the clipped norm, any
weight after each of two optimizer steps, or the saved checkpoint, with uneven labels, padding, a microbatch and a rank
without any label, and gradient accumulation.
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

import hfscale
from hfscale.testing import Case, RankPool, measure_parity

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.models import tiny
from tests.parity.test_layouts import LAYOUTS, MODELS

TOLERANCE = 1e-10
# Besides the layouts of the everyday tests; the models have two key/value heads, so tp4 holds each of them twice.
WIDER = {
    **LAYOUTS,
    "tp4": {"tp_size": 4},
    "tp2, sequence": {"tp_size": 2, "sequence_parallel": True},
    "tp4, sequence": {"tp_size": 4, "sequence_parallel": True, "sequence_regather": True},
    "tp2-shard2, sequence": {"tp_size": 2, "dp_shard_size": 2, "sequence_parallel": True},
}


def main() -> int:
    """Fill the table; the exit status is 1 where a cell is over the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/parity.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pools: dict[int, RankPool] = {}
    lines = [
        "# Parity with one process",
        "",
        "Written by `make test-all`. Each cell is the largest relative difference from plain transformers in one",
        "process, in float64: loss, every gradient, clipped norm, every weight after each of two optimizer steps,",
        "saved checkpoint; with uneven labels, padding, a microbatch and a rank without labels, and accumulation.",
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}.",
        f"A cell over {TOLERANCE:g} fails.",
        "",
        "| model | " + " | ".join(WIDER) + " |",
        "|---|" + "---|" * len(WIDER),
    ]
    failed = 0
    with tqdm(total=len(MODELS) * len(WIDER), desc="parity") as progress:
        for model, (family, changes) in MODELS.items():
            cells = []
            for sizes in WIDER.values():
                layout = hfscale.ParallelConfig(**sizes)
                pool = pools.setdefault(layout.total_size, RankPool(layout.total_size))
                worst = measure_parity(Case(tiny(family, **changes)), layout, pool).worst()
                failed += worst > TOLERANCE
                cells.append(f"{worst:.0e}")
                progress.update()
            lines.append(f"| {model} | " + " | ".join(cells) + " |")
    for pool in pools.values():
        pool.close()
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text("\n".join(lines) + "\n")
    print(f"{arguments.out}: {failed} cell(s) over {TOLERANCE:g}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
