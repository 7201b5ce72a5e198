"""Train a tiny model of every causal-LM family transformers has under tp2 against one process, and of other classes
(classification, masked tokens, sequence to sequence, speech, images); write docs/families.md.

    python scripts/family_sweep.py [--only gemma opt] [--out docs/families.md]

Equal: loss, every gradient, norm, weights after two steps and the saved checkpoint agree with plain transformers in one
process to 1e-9 in float64; by a plain loop (``loss = model(**batch).loss; loss.backward()``) where the class keeps a
loss of its own, which ``train_step`` refuses. Refused: hfscale names what is missing before training. Anything else is
a defect.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    CLIPModel,
    SiglipModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfscale
from hfscale.testing import Case, RankPool, measure_parity, plain
from hfscale.testing.clone import tiny_clone

TOLERANCE = 1e-9
LAYOUT = hfscale.ParallelConfig(tp_size=2)
# What a default config needs besides to build and train as a decoder.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": {"head_dim": 4},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "codegen": {"n_head": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": {"head_dim": 4},
    "glm_moe_dsa": {"index_n_heads": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "modernbert-decoder": {"pad_token_id": 0},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
    },
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
    "youtu": {"head_dim": 4},
}
_ROBERTA, _BART = {"pad_token_id": 1}, {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 3}
_T5 = {"pad_token_id": 0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "pad_token_id": 0}
_WHISPER = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40, **_BART}
_ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {},
    "bert": {},
    "deberta-v2": _DEBERTA,
    "distilbert": {"pad_token_id": 0},
    "electra": {},
    "roberta": _ROBERTA,
}
# (family, class, what makes its batches, changes to the clone)
OTHERS: list[tuple[str, Any, plain.Maker, dict[str, Any]]] = [
    *(
        (family, AutoModelForSequenceClassification, plain.sequence_classification, c)
        for family, c in _ENCODERS.items()
    ),
    *((family, AutoModelForMaskedLM, plain.causal_lm, c) for family, c in _ENCODERS.items()),
    *((family, AutoModelForTokenClassification, plain.token_classification, c) for family, c in _ENCODERS.items()),
    *((family, AutoModelForSeq2SeqLM, plain.sequence_to_sequence, _T5) for family in ("t5", "mt5", "umt5")),
    (
        "t5",
        AutoModelForSeq2SeqLM,
        plain.sequence_to_sequence,
        {**_T5, "is_gated_act": True, "dense_act_fn": "gelu_new"},
    ),
    *(
        (family, AutoModelForSeq2SeqLM, plain.sequence_to_sequence, _BART)
        for family in (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "m2m_100",
            "mbart",
            "mvp",
            "pegasus",
        )
    ),
    ("plbart", AutoModelForSeq2SeqLM, plain.sequence_to_sequence, _BART),
    ("marian", AutoModelForSeq2SeqLM, plain.sequence_to_sequence, {**_BART, "decoder_vocab_size": 67}),
    ("whisper", AutoModelForSpeechSeq2Seq, plain.speech_to_text, _WHISPER),
    ("vit", AutoModelForImageClassification, plain.image_classification, {"image_size": 32}),
    ("clip", CLIPModel, plain.image_text_pairs, {}),
    ("siglip", SiglipModel, plain.image_text_pairs, {}),
]


def config_of(family: str) -> Any:
    """A tiny config of ``family``, without a padding token (the host re-zeroes its embedding on every reload)."""
    changes = {"pad_token_id": None, **CHANGES.get(family, {})}
    config = tiny_clone(AutoConfig.for_model(family).get_text_config(), **changes)
    config.pad_token_id = changes["pad_token_id"]
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def judge(family: str, pool: RankPool) -> tuple[str, str]:
    """``(verdict, detail)`` for one causal-LM family."""
    try:
        config = config_of(family)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        ids = torch.randint(3, 60, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
    except Exception as error:  # whatever stock code says of a clone it cannot train
        return "no clone", f"{type(error).__name__}: {error}".split("\n")[0][:100]
    return measure(Case(config), pool)


def judge_class(
    family: str, auto_class: Any, maker: plain.Maker, changes: dict[str, Any], pool: RankPool
) -> tuple[str, str]:
    """The same for a class with a loss of its own."""
    config = tiny_clone(AutoConfig.for_model(family), **{"pad_token_id": None, **changes})
    if hasattr(config, "vision_config"):
        config.vision_config.image_size, config.vision_config.patch_size = 32, 8
    return measure(plain.PlainCase(config, auto_class=auto_class, make_batch=maker), pool)


def measure(case: Case, pool: RankPool) -> tuple[str, str]:
    """``(verdict, detail)`` for one case, by a plain loop where ``train_step`` is not for it."""
    try:
        planned = hfscale.plan(case.config, LAYOUT, auto_class=case.auto_class)
    except hfscale.HFScaleError as error:
        return "refused", str(error).split("\n  - ")[1].split(": use tp_size")[0][:160]
    except Exception as error:  # planning must say what is missing, and nothing else
        return "FAILS", f"plan: {type(error).__name__}: {error}"[:160]
    verdict = "equal"
    if planned.loss is None:
        verdict = "equal (plain loop)"
        if not isinstance(case, plain.PlainCase):
            case = plain.PlainCase(case.config, auto_class=case.auto_class)
    cut = sum(parameter.cut_over("tp") is not None for parameter in planned.owned())
    try:
        # the host's grouped matrix products take no float64
        if any("expert" in parameter.name for parameter in planned.owned()):
            case.hf_kwargs = {"experts_implementation": "eager"}
        parity = measure_parity(case, LAYOUT, pool)
    except Exception as error:  # a family that breaks is a row, not the end of the sweep
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return "FAILS", (lines[-1] if lines else str(error))[:160]
    if parity.worst() > TOLERANCE:
        return "DIFFERS", str(parity)[:160]
    return verdict, f"{parity.worst():.0e}, {cut} of {len(list(planned.owned()))} parameters cut"


def class_name(auto_class: Any, family: str) -> str:
    """The stock class behind an Auto class."""
    mapping = getattr(auto_class, "_model_mapping", None)
    found = mapping[type(AutoConfig.for_model(family))] if mapping is not None else auto_class
    return str((found[0] if isinstance(found, (list, tuple)) else found).__name__)


def main() -> int:
    """Write the table; the exit status is 1 where a family fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # tiny products: threads of this process would only wait for those of the ranks
    transformers.logging.set_verbosity_error()
    families = arguments.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    verdicts, others = {}, []
    with RankPool(2) as pool:
        for family, auto_class, maker, changes in tqdm(OTHERS, desc="classes"):
            if not arguments.only or family in arguments.only:
                verdict = judge_class(family, auto_class, maker, changes, pool)
                others.append((family, class_name(auto_class, family), *verdict))
                if arguments.only:
                    tqdm.write(" - ".join(others[-1]))
        for family in tqdm(families, desc="families"):
            verdicts[family] = judge(family, pool)
            if arguments.only:
                tqdm.write(f"{family}: {' - '.join(verdicts[family])}")
    built = {family: verdict for family, verdict in verdicts.items() if verdict[0] != "no clone"}
    kinds = ("equal", "refused", "DIFFERS", "FAILS")
    counts, other_counts = (
        {kind: sum(name.startswith(kind) for name in names) for kind in kinds}
        for names in ([verdict for verdict, _ in built.values()], [row[2] for row in others])
    )
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items()) + f" of {len(built)} that build and train"
    other_summary = ", ".join(f"{count} {kind}" for kind, count in other_counts.items()) + f" of {len(others)}"
    print(f"{summary}\nother classes: {other_summary}")
    if arguments.out:
        lines = [
            "# Families under tensor parallelism",
            "",
            "Written by `scripts/family_sweep.py`: a tiny model of every causal-LM family, tp2 against one process in",
            "float64 (loss, every gradient, norm, weights after two steps, saved checkpoint). A plain loop is",
            "`loss = model(**batch).loss; loss.backward()`, for classes that compute a loss of their own.",
            f"transformers {transformers.__version__}:",
            f"{summary}.",
            "",
            "| family | verdict | |",
            "|---|---|---|",
            *(f"| {family} | {kind} | {detail} |" for family, (kind, detail) in built.items()),
            "",
            "## Other classes",
            "",
            f"Likewise, by a plain loop: {other_summary}.",
            "",
            "| family | class | verdict | |",
            "|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in others),
        ]
        arguments.out.write_text("\n".join(lines) + "\n")
    wrong = sum(found[kind] for found in (counts, other_counts) for kind in ("DIFFERS", "FAILS"))
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
