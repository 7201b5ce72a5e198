"""Tiny configs of causal-LM families, with the fields that clones need to build and train."""

from typing import Any

from transformers import AutoConfig

from hfscale.extras.pictures import picture_configs
from hfscale.models.clone import LAYERS, layers_of_every_kind, shares_keys, tiny_clone

# Changes that a default config needs to build and train. RoBERTa's positions are counted from the padding token's id.
_ROBERTAS = (
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
)
CHANGES: dict[str, dict[str, Any]] = {
    **picture_configs.CHANGES,
    **{family: {"pad_token_id": 1} for family in _ROBERTAS},
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"},
}
# Changes that turn a dense clone into a mixture.
MIXED: dict[str, dict[str, Any]] = {
    "doge": {"is_moe": True},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}


def config_of(family: str, layers: int = LAYERS, **further: Any) -> Any:
    """Return a tiny config of ``family``, without a padding token, since random tokens could hit it."""
    changes = {"pad_token_id": None, **CHANGES.get(family, {}), **further}
    for name, value in changes.items():
        if name.startswith("layer") and isinstance(value, list) and len(value) < layers:
            changes[name] = (value * layers)[:layers]
    if changes.get("num_hidden_layers", layers) < layers:
        del changes["num_hidden_layers"]
    whole = AutoConfig.for_model(family).get_text_config()
    if shares_keys(whole):
        layers = max(layers, layers_of_every_kind(whole))
    config = tiny_clone(whole, layers=layers, **changes)
    config.pad_token_id = changes["pad_token_id"]
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config
