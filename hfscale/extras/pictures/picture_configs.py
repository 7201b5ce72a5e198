"""Make tiny configs of families whose default configs build no model: text models, and vision-language models."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ...models.clone import HEAD_DIM, merged, tiny_clone

# Changes that make default configs tiny. ``decoders``: changes to configs of text models. ``tower``: sizes in configs
# of vision towers. ``whole``: sizes in the configs that contain a tower's config. ``pictures``: nested changes to
# configs of vision-language families. ``sectioned``: families with rotary sections that their configs do not name.
_KNOWN = json.loads((Path(__file__).parent / "tiny_configs.json").read_text())
CHANGES: dict[str, dict[str, Any]] = _KNOWN["decoders"]
SIDE = 16
PATCH = 4
GRID = SIDE // PATCH
# Special tokens by the beginning of their field's name: distinct, and never drawn at random.
TOKENS = {
    **dict.fromkeys(("image_token", "image_patch"), 60),
    **dict.fromkeys(("image_start", "vision_start", "boi_token"), 61),
    **dict.fromkeys(("image_end", "vision_end", "eoi_token"), 62),
    **{"video_token": 63, "video_start": 64, "video_end": 65},
}
LOWEST = min(TOKENS.values())
IMAGE_TOKEN = TOKENS["image_token"]
PLACEHOLDERS = ("image_token_id", "image_token_index", "image_patch_id", "video_token_index")
# Families whose encoder reads only pictures -> text inputs to leave out.
LABELS_ONLY = {"pp_formulanet": ("attention_mask",), "pix2struct": ("attention_mask",)}
FAMILIES: dict[str, dict[str, Any]] = {
    **_KNOWN["pictures"],
    "aria": {"projector_patch_to_query_dict": {GRID**2: 4}},
}
# Changes to a nested text config, by the text config's own family.
TEXTS = {
    **CHANGES,
    "nemotron_h": {
        **CHANGES["nemotron_h"],
        "layers_block_type": ["linear_attention", "full_attention"],
    },
}


def with_pictures(family: Any, **changes: Any) -> Any:
    """Return a tiny config of a vision-language family (name or config) for pictures of ``SIDE x SIDE``."""
    config = AutoConfig.for_model(family) if isinstance(family, str) else family
    fields = config.to_dict()
    if fields.get("vision_config", {}) is None:  # some default configs have none
        config = AutoConfig.for_model(config.model_type, vision_config={})
        fields = config.to_dict()
    own = merged(
        _sizes_for_pictures(fields, "patch_size" in fields, _KNOWN["whole"]),
        FAMILIES.get(config.model_type, {}),
    )
    return tiny_clone(config, **merged(own, changes))


def _sizes_for_pictures(
    fields: dict[str, Any], seeing: bool, besides: dict[str, Any]
) -> dict[str, Any]:
    """Return the changes that make a config, with its nested configs, tiny and fit for the test pictures.

    ``seeing``: whether this config or an enclosing one reads pictures. ``besides``: further values for fields of this
    config.
    """
    wanted = {**(_KNOWN["tower"] if seeing else {}), **besides, **_tokens(fields)}
    sizes: dict[str, Any] = dict(TEXTS.get(fields.get("model_type", ""), {}))
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            sees = (
                name == "vision_config"
                or "patch_size" in value
                or (seeing and besides is not _KNOWN["whole"])
            )
            inside = _sizes_for_pictures(
                value, sees, _KNOWN["whole"] if "vision_config" in value else {}
            )
            sizes[name] = {"model_type": value["model_type"], **inside}
        elif name in wanted and value is not None:
            pair = isinstance(value, (list, tuple)) and type(wanted[name]) is int
            sizes[name] = [wanted[name]] * 2 if pair else wanted[name]
    return {**sizes, **_with_sections(fields)}


def _tokens(fields: dict[str, Any]) -> dict[str, int]:
    named = [
        name
        for name in fields
        if name.endswith(("_id", "_index")) and isinstance(fields[name], int)
    ]
    return {
        name: token for name in named for word, token in TOKENS.items() if name.startswith(word)
    }


def _with_sections(fields: dict[str, Any]) -> dict[str, Any]:
    """Return rotary sections (time, height, width) that fit the tiny heads, if the config divides its rotary embeddings
    into sections.
    """
    rope = fields.get("rope_parameters") or {}
    if fields.get("model_type") not in _KNOWN["sectioned"] and "mrope_section" not in rope:
        return {}
    half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    return {
        "rope_parameters": {
            **rope,
            "mrope_section": [half // 3, half // 3, half - 2 * (half // 3)],
        }
    }
