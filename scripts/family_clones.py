"""Classes other than causal language models, for scripts/family_sweep.py."""

import sys
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    CLIPModel,
    SiglipModel,
)

from hfscale.testing import plain

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.plain_cases import image_text_pairs

_ROBERTA = {"pad_token_id": 1}
_BART = {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 3}
_T5 = {"pad_token_id": 0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
_DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 8,
    "pad_token_id": 0,
}
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
    *(
        (family, AutoModelForTokenClassification, plain.token_classification, c)
        for family, c in _ENCODERS.items()
    ),
    *(
        (family, AutoModelForSeq2SeqLM, plain.sequence_to_sequence, _T5)
        for family in ("t5", "mt5", "umt5")
    ),
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
    (
        "marian",
        AutoModelForSeq2SeqLM,
        plain.sequence_to_sequence,
        {**_BART, "decoder_vocab_size": 67},
    ),
    ("whisper", AutoModelForSpeechSeq2Seq, plain.speech_to_text, _WHISPER),
    ("vit", AutoModelForImageClassification, plain.image_classification, {"image_size": 32}),
    ("clip", CLIPModel, image_text_pairs, {}),
    ("siglip", SiglipModel, image_text_pairs, {}),
]
