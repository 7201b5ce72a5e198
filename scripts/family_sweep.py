"""Train a tiny model of every causal-LM family transformers has under tp2 and under pp2 against one process, and of
other classes (classification, masked tokens, sequence to sequence, speech, images); write docs/families.md.

    python scripts/family_sweep.py [--only gemma opt] [--out docs/families.md]

Equal: loss, every gradient, norm, weights after two steps and the saved checkpoint agree with plain transformers in one
process to 1e-9 in float64; by a plain loop (``loss = model(**batch).loss; loss.backward()``) where the class keeps a
loss of its own, which ``train_step`` refuses. Refused: hfscale names what is missing before training. Anything else is
a defect.
"""

import argparse
import re
import warnings
from dataclasses import dataclass
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
from hfscale.testing.clone import LAYERS, tiny_clone

TOLERANCE = 1e-9
LAYOUT = hfscale.ParallelConfig(tp_size=2)
SEQUENCE = hfscale.ParallelConfig(tp_size=2, sequence_parallel=True)
STAGE_LAYERS = 4  # of a clone that is cut into two stages: each then has a layer within it
KINDS = ("equal", "refused", "DIFFERS", "FAILS")
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
    "prophetnet": {"pad_token_id": 0},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
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


def config_of(family: str, layers: int = LAYERS) -> Any:
    """A tiny config of ``family``, without a padding token (the host re-zeroes its embedding on every reload)."""
    changes = {"pad_token_id": None, **CHANGES.get(family, {})}
    for name, value in changes.items():
        if name.startswith("layer") and len(value) < layers:
            changes[name] = (value * layers)[:layers]
    if changes.get("num_hidden_layers", layers) < layers:
        del changes["num_hidden_layers"]
    config = tiny_clone(AutoConfig.for_model(family).get_text_config(), layers=layers, **changes)
    config.pad_token_id = changes["pad_token_id"]
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


@dataclass
class Verdict:
    """What became of one class.

    Attributes:
        kind: one of :data:`KINDS`, or ``no clone``.
        sequence: the same with the sequence cut as well; ``-`` where it was not tried.
        stages: the same in two pipeline stages.
        detail: the largest difference, or why not.
    """

    kind: str
    detail: str
    sequence: str = "-"
    stages: str = "-"


def judge(family: str, pool: RankPool) -> Verdict:
    """One causal-LM family."""
    try:
        config = config_of(family)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        ids = torch.randint(3, 60, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
    except Exception as error:  # whatever stock code says of a clone it cannot train
        return Verdict("no clone", f"{type(error).__name__}: {error}".split("\n")[0][:100])
    return judge_case(Case(config), Case(deeper(family, config)), pool)


def deeper(family: str, config: Any) -> Any:
    """A clone with layers enough for two stages, where the family has one; else ``config``."""
    try:
        return config_of(family, STAGE_LAYERS)
    except Exception:  # a config that checks its numbers of layers against one another
        return config


def judge_class(family: str, auto_class: Any, maker: plain.Maker, changes: dict[str, Any], pool: RankPool) -> Verdict:
    """The same for a class with a loss of its own."""
    config = tiny_clone(AutoConfig.for_model(family), **{"pad_token_id": None, **changes})
    if hasattr(config, "vision_config"):
        config.vision_config.image_size, config.vision_config.patch_size = 32, 8
    case = plain.PlainCase(config, auto_class=auto_class, make_batch=maker)
    return judge_case(case, case, pool)


def judge_case(case: Case, deep: Case, pool: RankPool) -> Verdict:
    """All layouts; stages with the clone that has more layers."""
    kind, detail = measure(case, LAYOUT, pool)
    details, sequence = [detail], "-"
    if kind.startswith("equal"):
        sequence, why = measure(case, SEQUENCE, pool)
        if sequence.startswith("equal"):
            sequence = "equal"
        else:
            details.append(why)
    stages, why = measure(deep, None, pool)
    details += [] if stages == "equal" else [why]
    return Verdict(kind, "; ".join(details), sequence, stages)


def measure(case: Case, layout: hfscale.ParallelConfig | None, pool: RankPool) -> tuple[str, str]:
    """``(verdict, detail)`` for one case, by a plain loop where ``train_step`` is not for it; ``None``: two stages."""
    try:
        layout = layout or two_stages(case)
        planned = hfscale.plan(case.config, layout, auto_class=case.auto_class)
    except hfscale.HFScaleError as error:
        why = str(error).split("\n  - ")[1]
        why = re.split(": use (?:tp_size|pp_size|sequence_parallel)", why)[0]
        return "refused", re.sub("pp_size=2 does not fit .*?:", "stages:", why)[:160]
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
        parity = measure_parity(case, layout, pool)
    except Exception as error:  # a family that breaks is a row, not the end of the sweep
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return "FAILS", (lines[-1] if lines else str(error))[:160]
    if parity.worst() > TOLERANCE:
        return "DIFFERS", str(parity)[:160]
    return verdict, f"{parity.worst():.0e}, {cut} of {len(list(planned.owned()))} parameters cut"


def two_stages(case: Case) -> hfscale.ParallelConfig:
    """Two stages with half of the layers each, whatever lies around them."""
    count = len(hfscale.plan(case.config, auto_class=case.auto_class).layers)
    halves = [count // 2, count - count // 2] if count > 1 else None
    return hfscale.ParallelConfig(pp_size=2, pipeline_schedule="1f1b", stage_layers=halves)


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
    verdicts: dict[str, Verdict] = {}
    others: list[tuple[str, str, Verdict]] = []
    with RankPool(2) as pool:
        for family, auto_class, maker, changes in tqdm(OTHERS, desc="classes"):
            if not arguments.only or family in arguments.only:
                verdict = judge_class(family, auto_class, maker, changes, pool)
                others.append((family, class_name(auto_class, family), verdict))
                if arguments.only:
                    tqdm.write(str(others[-1]))
        for family in tqdm(families, desc="families"):
            verdicts[family] = judge(family, pool)
            if arguments.only:
                tqdm.write(f"{family}: {verdicts[family]}")
    built = {family: verdict for family, verdict in verdicts.items() if verdict.kind != "no clone"}
    found = [*built.values(), *(verdict for _, _, verdict in others)]
    summaries = [summarize(list(built.values())), summarize([verdict for _, _, verdict in others])]
    print("\n".join(summaries))
    if arguments.out:
        lines = [
            "# Families under tensor parallelism and in pipeline stages",
            "",
            "Written by `scripts/family_sweep.py`: a tiny model of every causal-LM family, tp2 against one process in",
            "float64 (loss, every gradient, norm, weights after two steps, saved checkpoint), again with",
            f"`sequence_parallel=True`, and again in two pipeline stages (1F1B, {STAGE_LAYERS} layers where the family",
            "can have them). A plain loop is `loss = model(**batch).loss; loss.backward()`, for classes that compute a",
            "loss of their own; stages are for `train_step`, which those refuse.",
            "",
            f"transformers {transformers.__version__}, of those that build and train:",
            *f"{summaries[0]}.".replace("; ", ";\n").splitlines(),
            "",
            "| family | tensor parallel | with the sequence cut | stages | |",
            "|---|---|---|---|---|",
            *(f"| {family} | {v.kind} | {v.sequence} | {v.stages} | {v.detail} |" for family, v in built.items()),
            "",
            "## Other classes",
            "",
            *f"Likewise: {summaries[1]}.".replace("; ", ";\n").splitlines(),
            "",
            "| family | class | tensor parallel | with the sequence cut | stages | |",
            "|---|---|---|---|---|---|",
            *(
                f"| {family} | {name} | {v.kind} | {v.sequence} | {v.stages} | {v.detail} |"
                for family, name, v in others
            ),
        ]
        arguments.out.write_text("\n".join(lines) + "\n")
    return int(any(kind in ("DIFFERS", "FAILS") for v in found for kind in (v.kind, v.sequence, v.stages)))


def summarize(verdicts: list[Verdict]) -> str:
    """``140 equal, 7 refused, ... of 147; with the sequence cut 130 equal, ...; in stages 135 equal, ...``."""

    def counted(kinds: list[str]) -> str:
        return ", ".join(f"{sum(found.startswith(kind) for found in kinds)} {kind}" for kind in KINDS)

    return (
        f"{counted([v.kind for v in verdicts])} of {len(verdicts)}; "
        f"with the sequence cut {counted([v.sequence for v in verdicts])}; "
        f"in stages {counted([v.stages for v in verdicts])}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
