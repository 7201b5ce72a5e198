"""Run every tested family in every layout against one process and write the table in docs/parity.md.

python scripts/parity_table.py [--out docs/parity.md]

Each cell is the largest relative difference found, in float64 on gloo, in the loss, any gradient, the clipped norm, any
weight after each of two optimizer steps, or the saved checkpoint, with uneven labels, padding, a microbatch and a rank
without any label, and gradient accumulation.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

import hfscale
from hfscale.testing import Case, RankPool, measure_parity

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.mixtures import EAGER, gpt_oss, qwen2_moe, qwen3_moe
from tests.parity.test_experts import LAYOUTS as EXPERT_LAYOUTS, SEQUENCE
from tests.parity.test_layouts import LAYOUTS, MODELS
from tests.parity.test_pipeline import SCHEDULES, deep
from tests.tiny_models import tiny

TOLERANCE = 1e-10
# Besides the layouts of the everyday tests; the models have two key/value heads, so tp4 holds each of them twice.
WIDER = {
    **LAYOUTS,
    "tp4": {"tp_size": 4},
    "tp2, sequence": {"tp_size": 2, "sequence_parallel": True},
    "tp4, sequence": {"tp_size": 4, "sequence_parallel": True, "sequence_regather": True},
    "tp2-shard2, sequence": {"tp_size": 2, "dp_shard_size": 2, "sequence_parallel": True},
}
STAGES = {
    **{f"pp2, {schedule}": {"pp_size": 2, "pipeline_schedule": schedule} for schedule in SCHEDULES},
    "pp4": {"pp_size": 4},
    "pp2 x tp2": {"pp_size": 2, "tp_size": 2},
    "pp2 x tp2, sequence": {"pp_size": 2, "tp_size": 2, "sequence_parallel": True},
    "pp2 x shard2": {"pp_size": 2, "dp_shard_size": 2},
    "pp2 x replicate2": {"pp_size": 2, "dp_replicate_size": 2},
    "pp2 x tp2 x shard2, sequence": {
        "pp_size": 2,
        "tp_size": 2,
        "dp_shard_size": 2,
        "sequence_parallel": True,
    },
}
EXPERTS = {
    **EXPERT_LAYOUTS,
    "ep2, shard8": {"ep_size": 2, "dp_shard_size": 8},
    **{
        f"ep2, pp2, {schedule}": {"ep_size": 2, "pp_size": 2, "pipeline_schedule": schedule}
        for schedule in SCHEDULES
    },
    "ep2, tp2, pp2, sequence": {**SEQUENCE, "pp_size": 2},
    "ep2, pp2, shard4": {"ep_size": 2, "pp_size": 2, "dp_shard_size": 4},
}
MIXTURES = {"qwen3_moe": qwen3_moe, "qwen2_moe": qwen2_moe, "gpt_oss": gpt_oss}
STAGED = ("llama", "llama-tied", "mistral", "qwen3", "gpt2", "gpt2-untied")


def main() -> int:
    """Fill the table; the exit status is 1 where a cell is over the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/parity.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    pools: dict[int, RankPool] = {}
    lines = [
        "# Parity with one process",
        "",
        "Written by `make test-all`. Each cell compares training in a layout with plain transformers in one process.",
        "It is the largest relative difference, in float64, of the loss, every gradient, the clipped norm, every",
        "weight after each of two optimizer steps, and the saved checkpoint. The runs have uneven labels, padding,",
        "a microbatch without labels, a rank without labels, and gradient accumulation.",
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}.",
        f"A difference over {TOLERANCE:g} fails.",
        "",
        "| model | " + " | ".join(WIDER) + " |",
        "|---|" + "---|" * len(WIDER),
    ]
    failed = 0

    def cell(case: Case, sizes: dict[str, Any]) -> str:
        nonlocal failed
        layout = hfscale.ParallelConfig(**sizes)
        if layout.total_size not in pools:
            pools[layout.total_size] = RankPool(layout.total_size)
        worst = measure_parity(case, layout, pools[layout.total_size]).worst()
        failed += worst > TOLERANCE
        progress.update()
        return f"{worst:.0e}"

    cells_in_all = (
        len(MODELS) * len(WIDER) + len(STAGED) * len(STAGES) + len(MIXTURES) * len(EXPERTS)
    )
    with tqdm(total=cells_in_all, desc="parity") as progress:
        for model, (family, changes) in MODELS.items():
            cells = [cell(Case(tiny(family, **changes)), sizes) for sizes in WIDER.values()]
            lines.append(f"| {model} | " + " | ".join(cells) + " |")
        lines += [
            "",
            "Differences with pipeline stages, for models of five layers with four microbatches (1f1b unless a row "
            "names another\nschedule):",
            "",
        ]
        lines += ["| layout | " + " | ".join(STAGED) + " |", "|---|" + "---|" * len(STAGED)]
        for name, sizes in STAGES.items():
            cells = []
            for model in STAGED:
                family, changes = MODELS[model]
                cells.append(cell(Case(deep(family, **changes), accumulation=4), sizes))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        lines += [
            "",
            "Differences from one process, of MoE models with four experts per layer, each whole on one rank or "
            "(`of tp2`) sharded",
            "over two tensor ranks; models in pipeline stages have four layers:",
            "",
        ]
        lines += ["| layout | " + " | ".join(MIXTURES) + " |", "|---|" + "---|" * len(MIXTURES)]
        for name, sizes in EXPERTS.items():
            cells = []
            for config in MIXTURES.values():
                staged = {"num_hidden_layers": 4} if "pp_size" in sizes else {}
                if staged and config is gpt_oss:
                    staged["layer_types"] = ["sliding_attention", "full_attention"] * 2
                cells.append(
                    cell(
                        Case(config(**staged), accumulation=4 if staged else 2, hf_kwargs=EAGER),
                        sizes,
                    )
                )
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for pool in pools.values():
        pool.close()
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text("\n".join(lines) + "\n")
    print(f"{arguments.out}: {failed} cell(s) over {TOLERANCE:g}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
