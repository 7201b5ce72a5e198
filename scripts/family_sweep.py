"""Train a tiny model of every causal-LM family transformers has under tp2 against one process; write docs/families.md.

    python scripts/family_sweep.py [--only gemma opt] [--out docs/families.md]

Equal: loss, every gradient, norm, weights after two steps and the saved checkpoint agree with plain transformers in one
process to 1e-9 in float64. Refused: hfscale names what is missing before training. Anything else is a defect.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfscale
from hfscale.testing import Case, RankPool, measure_parity
from hfscale.testing.clone import tiny_clone

TOLERANCE = 1e-9
LAYOUT = hfscale.ParallelConfig(tp_size=2)
# What a default config needs besides to build and train as a decoder.
CHANGES: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_bigcode": {"multi_query": False, "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "modernbert-decoder": {"pad_token_id": 0},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    # positions are counted from the padding token's id
    "camembert": {"pad_token_id": 1},
    "data2vec-text": {"pad_token_id": 1},
    "roberta": {"pad_token_id": 1},
    "roberta-prelayernorm": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "xlm-roberta-xl": {"pad_token_id": 1},
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"},
}


def config_of(family: str) -> Any:
    """A tiny config of ``family``, without a padding token (the host re-zeroes its embedding on every reload)."""
    changes = {"pad_token_id": None, **CHANGES.get(family, {})}
    config = tiny_clone(AutoConfig.for_model(family).get_text_config(), **changes)
    config.pad_token_id = changes["pad_token_id"]
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def judge(family: str, pool: RankPool) -> tuple[str, str]:
    """``(verdict, detail)`` for one family."""
    try:
        config = config_of(family)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        ids = torch.randint(3, 60, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
    except Exception as error:  # whatever stock code says of a clone it cannot train
        return "no clone", f"{type(error).__name__}: {error}".split("\n")[0][:100]
    try:
        plan = hfscale.plan(config, LAYOUT)
    except hfscale.HFScaleError as error:
        return "refused", str(error).split("\n  - ")[1].split(": use tp_size")[0][:160]
    if plan.loss is None:
        return "refused", f"train_step: {type(model).__name__} computes a loss of its own (a plain loop runs)"
    cut = sum(planned.cut_over("tp") is not None for planned in plan.owned())
    try:
        # the host's grouped matrix products take no float64
        kwargs = {"experts_implementation": "eager"} if any("expert" in p.name for p in plan.owned()) else {}
        parity = measure_parity(Case(config, hf_kwargs=kwargs), LAYOUT, pool)
    except Exception as error:  # a family that breaks is a row, not the end of the sweep
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return "FAILS", (lines[-1] if lines else str(error))[:160]
    if parity.worst() > TOLERANCE:
        return "DIFFERS", str(parity)[:160]
    return "equal", f"{parity.worst():.0e}, {cut} of {len(list(plan.owned()))} parameters cut"


def main() -> int:
    """Write the table; the exit status is 1 where a family fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    families = arguments.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    verdicts = {}
    with RankPool(2) as pool:
        for family in tqdm(families, desc="families"):
            verdicts[family] = judge(family, pool)
            if arguments.only:
                tqdm.write(f"{family}: {' - '.join(verdicts[family])}")
    built = {family: verdict for family, verdict in verdicts.items() if verdict[0] != "no clone"}
    counts = {kind: sum(v[0] == kind for v in built.values()) for kind in ("equal", "refused", "DIFFERS", "FAILS")}
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items()) + f" of {len(built)} that build and train"
    print(summary)
    if arguments.out:
        lines = [
            "# Families under tensor parallelism",
            "",
            "Written by `scripts/family_sweep.py`: a tiny model of every causal-LM family, tp2 against one process in",
            "float64 (loss, every gradient, norm, weights after two steps, saved checkpoint).",
            f"transformers {transformers.__version__}:",
            f"{summary}.",
            "",
            "| family | verdict | |",
            "|---|---|---|",
            *(f"| {family} | {kind} | {detail} |" for family, (kind, detail) in built.items()),
        ]
        arguments.out.write_text("\n".join(lines) + "\n")
    return int(counts["DIFFERS"] + counts["FAILS"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
