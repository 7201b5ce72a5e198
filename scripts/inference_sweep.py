"""Infer the blueprint of every family that hfscale's table has, as if it had none; write docs/inference.md.

    python scripts/inference_sweep.py [--only gemma opt] [--out docs/inference.md]

Nothing is compared by eye: a block counts where two tensor ranks compute on a tiny clone what one process does, output
and every gradient, in float64. Families that neither the table nor transformers has a plan for are listed as well.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from family_sweep import config_of
from notes import note
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hfscale import PlanError
from hfscale.api.find_blueprint import find_blueprint
from hfscale.extras.proofs.infer.search_blueprint import infer
from hfscale.models import FAMILIES
from hfscale.models.decoders import DECODERS
from hfscale.models.gpt_decoders import GPT_DECODERS


def build(family: str) -> Any:
    """A tiny model of ``family`` without memory, or ``None`` where there is none."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config_of(family))
    except Exception:  # whatever stock code says of a clone it cannot build
        return None


def judge(family: str, model: Any) -> tuple[bool, bool, str, float]:
    """``(attention proved, other blocks proved, detail, seconds)``."""
    start = time.monotonic()
    try:
        inference = infer(model)
    except PlanError as error:
        reason = str(error).partition(f"inferred from {type(model).__name__}: ")[2]
        return False, False, note(reason), time.monotonic() - start
    blocks = inference.blueprint.blocks
    written = FAMILIES[family].blocks if family in FAMILIES else {}
    missing = [path or "the layer" for path in written if path not in blocks]
    detail = (
        f"{inference.proof.worst:.0e}, cuts {', '.join(path or 'the layer' for path in blocks)}"
    )
    detail += f"; the table also cuts {', '.join(missing)}" if missing else ""
    others = [path for path in blocks if path not in inference.attention]
    return bool(inference.attention), bool(others), detail, time.monotonic() - start


def _has_plan(model: Any) -> bool:
    try:
        find_blueprint(model, may_infer=False)
    except PlanError:
        return False
    return True


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows: list[tuple[str, str, bool, bool, str, float]] = []
    for family in tqdm(
        arguments.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), desc="families"
    ):
        model = build(family)
        if model is None:
            continue
        kind = (
            "own table"
            if family in DECODERS | GPT_DECODERS
            else "none"
            if not _has_plan(model)
            else ""
        )
        if kind or arguments.only:
            rows.append((family, kind or "known", *judge(family, model)))
            tqdm.write(f"{rows[-1]}")
    own = [row for row in rows if row[1] == "own table"]
    new = [row for row in rows if row[1] == "none"]
    summary = (
        f"For {len(own)} decoders hfscale has a blueprint in its own table; inference alone proves attention in "
        f"{sum(row[2] for row in own)} of them\nand an MLP (or a recurrence) in {sum(row[3] for row in own)}. For "
        f"{len(new)} other model types neither hfscale nor transformers has one;\ninference proves a block in "
        f"{sum(row[2] or row[3] for row in new)} of them."
    )
    print(summary)
    if arguments.out:
        mark = {True: "proved", False: "-"}
        lines = [
            "# Inferred blueprints",
            "",
            "Written by `scripts/inference_sweep.py`. To shard a model, hfscale must know which modules are its",
            "attention and MLP blocks, and which projections they have: its blueprint. For each model type below,",
            "hfscale derives the blueprint from the model itself (inference), as if none were known. A block is proved",
            "if, on a tiny copy of the model, its output and every gradient on two tensor ranks equal those of one",
            f"process, in float64, to 1e-10. transformers {transformers.__version__}.",
            "",
            summary,
            "",
            "| family | plan without inference | attention | other blocks | |",
            "|---|---|---|---|---|",
            *(
                f"| {f} | {kind} | {mark[a]} | {mark[m]} | {detail} |"
                for f, kind, a, m, detail, _ in rows
            ),
        ]
        arguments.out.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
