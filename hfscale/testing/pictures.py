"""Tiny vision-language models, and batches of texts with pictures for them.

Families differ in how they are given pictures; what a tower makes of them goes where the text has placeholders. How
many placeholders a picture needs is not computed here: the model is asked what features it makes, and they are counted.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from .._host.transformers.classes import classes_by_config
from ..families.clone import HEAD_DIM, HIDDEN, LAYERS, tiny_clone
from ..families.precision import keep_float64
from .parity import Batch, Case

SIDE, PATCH = 16, 4
GRID = SIDE // PATCH
# Tokens with a meaning, by the word in the name of their field: apart from one another, and from those that are drawn.
_TOKENS = {
    "image_token": 60,
    "image_start": 61,
    "vision_start": 61,
    "boi_token": 61,
    "image_end": 62,
    "vision_end": 62,
    "eoi_token": 62,
    "video_token": 63,
    "video_start": 64,
    "video_end": 65,
}
_LOWEST = min(_TOKENS.values())
_TOWER: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "depth": LAYERS,
    "embed_dim": HIDDEN,
    "out_hidden_size": HIDDEN,
    "projection_dim": HIDDEN,
    "num_position_embeddings": GRID**2,
    "position_embedding_size": GRID**2,
    "window_size": SIDE,
    "fullatt_block_indexes": [LAYERS - 1],
    "deepstack_visual_indexes": [0],
    "intermediate_layers_indices": [0],
    "num_global_layers": 1,
    "max_num_tiles": 1,
    "supported_aspect_ratios": [[1, 1]],
    "vision_output_dim": 2 * HIDDEN,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": HIDDEN,
    "projector_output_dim": HIDDEN,
    "pooling_kernel_size": 2,
}
_WHOLE: dict[str, Any] = {
    "vision_feature_layer": -1,
    "image_seq_length": GRID**2,
    "mm_tokens_per_image": (GRID // 2) ** 2,
    "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]],
    "projection_dim": HIDDEN,
}


_STARTS = {"vision_start_token_id": _TOKENS["vision_start"], "vision_end_token_id": _TOKENS["vision_end"]}
# What a family needs besides, in the whole config, its text's and its tower's.
_FAMILIES: dict[str, dict[str, Any]] = {
    "kimi_k25": {"projection_hidden_size": HIDDEN},
    "aria": {"projector_patch_to_query_dict": {GRID**2: 4}},
    **{
        name: {"image_token_index": _TOKENS["image_token"], "num_query_tokens": 4}
        for name in ("blip-2", "instructblip")
    },
    **{name: {"image_token_id": _TOKENS["image_token"]} for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")},
    **{name: dict(_STARTS) for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
}
_TEXTS: dict[str, dict[str, Any]] = {
    "cohere_compass": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "lfm2_vl": {"layer_types": ["conv", "full_attention"]},
    "step3p7": {"sliding_window": 8},
}
_TOWERS: dict[str, dict[str, Any]] = {
    "gemma4": {"intermediate_size": 48},
    "llama4": {"intermediate_size": 4 * HIDDEN, "vision_output_dim": HIDDEN},
}


def with_pictures(family: str, **changes: Any) -> Any:
    """A tiny config of a vision-language family, its pictures ``SIDE x SIDE``."""
    config = AutoConfig.for_model(family)
    if config.vision_config is None:  # of a family that comes without, too
        config = AutoConfig.for_model(family, vision_config={})
    config = tiny_clone(config, **changes)
    text = config.get_text_config(decoder=True)
    if hasattr(text, "cross_attention_layers"):
        text.cross_attention_layers = [text.num_hidden_layers - 1]
    for part in (config.vision_config, config):
        fields = part.to_dict()
        small = {**(_WHOLE if part is config else {**_TOWER, **_TOWERS.get(family, {})}), **_tokens(fields)}
        for name, value in small.items():
            if fields.get(name) is not None:
                pair = isinstance(fields[name], (list, tuple)) and type(value) is int
                setattr(part, name, [value, value] if pair else value)
    _shorten_sections(text)
    for part, own in ((config, _FAMILIES.get(family, {})), (text, _TEXTS.get(family, {}))):
        for name, value in own.items():
            setattr(part, name, value)
    fields = config.to_dict()
    return type(config)(**{name: fields[name] for name in fields if name not in ("model_type", "transformers_version")})


def _tokens(fields: dict[str, Any]) -> dict[str, int]:
    named = [name for name in fields if name.endswith(("_id", "_index")) and isinstance(fields[name], int)]
    return {name: token for name in named for word, token in _TOKENS.items() if name.startswith(word)}


def _shorten_sections(text: Any) -> None:
    """Rotary sections (time, height, width), of heads this small."""
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope or text.model_type in _SECTIONED:
        half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["mrope_section"] = [half // 3, half // 3, half - 2 * (half // 3)]


_SECTIONED = (
    *("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm4v_moe_text", "glm_ocr_text", "paddleocr_vl_text"),
    *("ernie4_5_vl_moe_text", "hunyuan_vl_text", "qwen2_5_omni_text"),
)


@dataclass
class PictureCase(Case):
    """Texts of which some have a picture in their middle.

    Attributes:
        text_alone: which ``(step, distinct batch, microbatch)`` have none.
    """

    auto_class: Any = AutoModelForImageTextToText
    text_alone: frozenset[tuple[int, int, int]] = frozenset()

    def batches(self, batch_world: int) -> list[list[list[Batch]]]:
        """Those of any case, with pictures."""
        generator = torch.Generator().manual_seed(12)
        return [
            [
                [
                    self._typed(self._without_special(microbatch)) if (step, rank, index) in self.text_alone else
                    self.illustrated(microbatch, generator)
                    for index, microbatch in enumerate(microbatches)
                ]
                for rank, microbatches in enumerate(ranks)
            ]
            for step, ranks in enumerate(super().batches(batch_world))
        ]  # fmt: skip

    def illustrated(self, batch: Batch, generator: torch.Generator) -> Batch:
        """The texts of a batch, each with a picture."""
        pictures = [self._picture(generator) for _ in batch["input_ids"]]
        sides = {"pixel_values": -1} if "target_sizes" in pictures[0] else {}  # patches side by side
        joined: dict[str, Tensor] = {
            name: torch.cat([each[name] for each in pictures], dim=sides.get(name, 0)) for name in pictures[0]
        }
        return {**self._typed(self._placed(self._without_special(batch), self._rows(pictures[0]))), **joined}

    def _without_special(self, batch: Batch) -> Batch:
        ids, labels = batch["input_ids"], batch["labels"]
        return {
            **batch,
            "input_ids": ids.where(ids < _LOWEST, ids - 10),
            "labels": labels.where(labels < _LOWEST, labels - 10),
        }

    @property
    def _token(self) -> int:
        """The placeholder; a token that is never drawn where attention reads pictures without any."""
        fields = self.config.to_dict()
        names = [name for name in ("image_token_id", "image_token_index") if fields.get(name) is not None]
        return int(fields[names[0]]) if names else _TOKENS["image_token"]

    def _placed(self, batch: Batch, rows: int) -> Batch:
        """The text with ``rows`` placeholders, which are no labels."""
        fill = {"input_ids": self._token, "labels": -100, "attention_mask": 1}
        return {
            name: torch.cat([value[:, :2], value.new_full((len(value), rows), fill[name]), value[:, 2:]], dim=1)
            for name, value in batch.items()
        }

    def _typed(self, batch: Batch) -> Batch:
        """With what tells placeholders from text, where the class takes it."""
        kinds = (name for name in ("token_type_ids", "mm_token_type_ids") if name in self._arguments)
        return {**batch, **{name: (batch["input_ids"] == self._token).long() for name in kinds}}

    @property
    def _arguments(self) -> Any:
        kind = classes_by_config(AutoModelForImageTextToText)[type(self.config)]
        return inspect.signature(kind.forward).parameters

    def _picture(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One picture, as the family is given it."""
        given, vision = self._arguments, self.config.vision_config
        channels = int(getattr(vision, "num_channels", 0) or getattr(vision, "in_channels", 3))

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator)

        if "image_grid_thw" in given:  # patches, those of all pictures one after the other
            square = any(word in self.config.model_type for word in ("kimi", "paddleocr"))
            width = channels * getattr(vision, "temporal_patch_size", 1) * PATCH**2
            shape = (channels, PATCH, PATCH) if square else (width,)
            merged = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in given else {}
            grid = torch.tensor([[1, GRID, GRID]])
            return {"pixel_values": noise(GRID**2, *shape), "image_grid_thw": grid, **merged}
        if "spatial_shapes" in given:
            room = {"pixel_attention_mask": torch.ones(1, GRID**2, dtype=torch.long)}
            sides = torch.tensor([[GRID, GRID]])
            return {"pixel_values": noise(1, GRID**2, channels * PATCH**2), "spatial_shapes": sides, **room}
        if "target_sizes" in given:  # patches side by side
            return {
                "pixel_values": noise(1, channels, PATCH, GRID**2 * PATCH),
                "target_sizes": torch.tensor([[GRID, GRID]], dtype=torch.int32),
            }
        if "qformer_input_ids" in given:  # what is asked about it
            asked = torch.randint(3, 60, (1, 5), generator=generator)
            return {"pixel_values": noise(1, channels, SIDE, SIDE), "qformer_input_ids": asked}
        if "image_position_ids" in given:
            places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).flip(-1)
            return {"pixel_values": noise(1, GRID**2, channels * PATCH**2), "image_position_ids": places[None]}
        if "aspect_ratio_ids" in given:  # [samples, pictures, tiles, ...]
            ones = torch.ones(1, 1, 1, dtype=torch.long)
            picture = noise(1, 1, 1, channels, SIDE, SIDE)
            return {"pixel_values": picture, "aspect_ratio_ids": ones[0], "aspect_ratio_mask": ones}
        if "pixel_attention_mask" in given:  # [samples, pictures, ...]
            return {"pixel_values": noise(1, 1, channels, SIDE, SIDE)}
        if hasattr(self.config, "image_grid_pinpoints"):  # the whole picture, and two tiles of it
            size = torch.tensor([[2 * SIDE, SIDE]])
            return {"pixel_values": noise(1, 3, channels, SIDE, SIDE), "image_sizes": size}
        sizes = {"image_sizes": torch.tensor([[SIDE, SIDE]])} if vision.model_type == "pixtral" else {}
        return {"pixel_values": noise(1, channels, SIDE, SIDE), **sizes}

    def _rows(self, picture: dict[str, Tensor]) -> int:
        """How many features the model makes of a picture; 0 where attention reads them, without placeholders."""
        if not {"image_token_id", "image_token_index"} & self.config.to_dict().keys():
            return 0
        key = self.config.to_json_string(use_diff=False)
        if key not in _ROWS:
            _ROWS[key] = _count_features(self.config, picture)
        return _ROWS[key]


_ROWS: dict[str, int] = {}


def _count_features(config: Any, picture: dict[str, Tensor]) -> int:
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()
    maker = getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None)
    if maker is None:
        return 0
    with torch.no_grad(), keep_float64():
        found = maker(**picture)
    if not isinstance(found, (Tensor, tuple, list)):
        found = found.last_hidden_state if found.pooler_output is None else found.pooler_output
    each = [found] if isinstance(found, Tensor) else list(found)
    return sum(features.numel() // features.shape[-1] for features in each)
