"""Train LoRA around all linear modules of a tiny model of every causal-LM family under tp2, with the sequence cut, and
in two stages, against stock PEFT in one process; write docs/adapters.md.

    python scripts/adapter_sweep.py [--only gemma opt] [--lora use_dora=true] [--out docs/adapters.md]

Equal: loss, every gradient, norm, weights after two steps and the saved adapter agree to 1e-9 in float64.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from family_sweep import LAYOUT, SEQUENCE, Verdict, deeper, measure, trainable
from family_tables import summarize
from notes import note
from peft import LoraConfig
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfscale
from hfscale.testing import Case, RankPool, plain

IDS = torch.arange(3, 19).reshape(2, 8)
HEAD = """# Adapters over families

This table, written by `scripts/adapter_sweep.py`, compares LoRA in hfscale with LoRA in stock PEFT in one process, in
float64 (transformers {transformers}, PEFT {peft}). A tiny model of every causal-LM family has LoRA on all linear
modules; loss, every gradient, gradient norm, weights after two steps and the saved adapter are compared. The layouts
are two tensor ranks, two tensor ranks with `sequence_parallel=True` ("the sequence cut"), and two pipeline stages. If
PEFT supports the family's MoE layers, fused experts and routers have LoRA too (`target_parameters`).

The numbers of families whose LoRA training equals stock PEFT, is refused, differs or fails are, over two tensor ranks,
{summary}.

| family | tensor parallel | with the sequence cut | stages | |
|---|---|---|---|---|
"""


def judge(family: str, lora: dict[str, Any], pool: RankPool) -> Verdict:
    """One family."""
    config, why = trainable(family)
    if config is None:
        return Verdict("no clone", why)
    try:
        stock = peft.get_peft_model(
            AutoModelForCausalLM.from_config(config, dtype=torch.float32), LoraConfig(**lora)
        )
        stock(input_ids=IDS, labels=IDS).loss.backward()
    except Exception as error:  # whatever PEFT says of a family that it does not adapt
        return Verdict(
            "no clone", note(f"stock PEFT: {type(error).__name__}: {error}".split("\n")[0], 100)
        )
    cases = {LAYOUT: config, SEQUENCE: config, None: deeper(family, config)}
    found = [_measured(_case(clone, lora), layout, pool) for layout, clone in cases.items()]
    details = dict.fromkeys(
        detail for kind, detail in found[:1] + [f for f in found[1:] if f[0][:5] != "equal"]
    )
    return Verdict(found[0][0], "; ".join(details), found[1][0], found[2][0])


def _measured(case: Case, layout: hfscale.ParallelConfig | None, pool: RankPool) -> tuple[str, str]:
    """What hfscale says of the adapter itself comes with the model."""
    kind, detail = measure(case, layout, pool)
    refusal = "hfscale.errors.ConfigError: "
    return ("refused", detail.split(refusal)[1]) if refusal in detail else (kind, detail)


def _case(config: Any, lora: dict[str, Any]) -> Case:
    """By a plain loop where the class has a loss of its own."""
    kind = plain.PlainCase if hfscale.plan(config).loss is None else Case
    return kind(config, peft=LoraConfig(**lora))


def main() -> int:
    """Write the table; the exit status is 1 where a family fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--lora", nargs="*", default=[], help="fields of LoraConfig, as name=JSON")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    changes = {
        name: json.loads(value) for name, value in (field.split("=", 1) for field in arguments.lora)
    }
    lora = {"r": 3, "target_modules": "all-linear", **changes}
    verdicts: dict[str, Verdict] = {}
    with RankPool(2) as pool:
        for family in tqdm(
            arguments.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), desc="families"
        ):
            verdict = judge(family, lora, pool)
            if verdict.kind != "no clone":
                verdicts[family] = verdict
            tqdm.write(f"{family}: {verdict}")
    summary = summarize(list(verdicts.values()))
    print(summary)
    rows = [
        f"| {family} | {v.kind} | {v.sequence} | {v.stages} | {v.detail} |"
        for family, v in verdicts.items()
    ]
    if arguments.out:
        head = HEAD.format(
            transformers=transformers.__version__, peft=peft.__version__, summary=summary
        )
        arguments.out.write_text(head + "\n".join(rows) + "\n")
    bad = [v for v in verdicts.values() if {"DIFFERS", "FAILS"} & {v.kind, v.sequence, v.stages}]
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
