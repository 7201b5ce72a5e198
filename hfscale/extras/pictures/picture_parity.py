"""Make tiny vision-language models, and batches of texts with pictures for them.

Families differ in the format of pictures. Features of the vision tower replace placeholders in the text. To find the
number of placeholders per picture, a model computes the features of one picture, and the features are counted.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from ..._compat.transformers.classes import classes_by_config
from ..._compat.transformers.experts import use_eager_experts
from ...models.precision import keep_float64
from ...testing.parity import Batch, Case
from ...testing.plain import PlainCase
from .picture_configs import GRID, IMAGE_TOKEN, LABELS_ONLY, LOWEST, PATCH, PLACEHOLDERS, SIDE

_ROWS: dict[str, int] = {}
Picture = dict[str, Tensor]
_Noise = Callable[..., Tensor]
_PLACED = ("token_type_ids", "mm_token_type_ids", "image_embeds_position_mask")
"""Inputs that tell placeholders and text apart."""
_WAYS = (
    "image_grid_thw",
    "image_grid_hw",
    "spatial_shapes",
    "target_sizes",
    "qformer_input_ids",
    "image_position_ids",
    "aspect_ratio_ids",
    "image_token_pooling",
    "flattened_patches",
    "high_res_pixel_values",
    "state",
    "tile_fine_mask",
    "pixel_attention_mask",
    "image_attention_mask",
    "image_grid_pinpoints",
    "image_patches",
)
"""Inputs or config fields, by which the format of pictures is recognized: the first one that a family has decides."""


@dataclass
class PictureCase(Case):
    """Define a parity case in which most texts have a picture in the middle."""

    auto_class: Any = AutoModelForImageTextToText
    # the ``(step, distinct batch, microbatch)`` without pictures
    text_alone: frozenset[tuple[int, int, int]] = frozenset()

    def batches(self, batch_world: int) -> list[list[list[Batch]]]:
        """Return the batches of the base class, with pictures added."""
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
        """Return the texts of a batch, with a picture in each text."""
        pictures = [
            make_picture(self.config, self._arguments, generator) for _ in batch["input_ids"]
        ]
        text = self._placed(self._without_special(batch), self._rows(pictures[0]))
        return {**self._typed(text), **join_pictures(pictures)}

    def _without_special(self, batch: Batch) -> Batch:
        drawn = {name: batch[name] for name in ("input_ids", "labels")}
        return {
            **batch,
            **{name: x.where(x < LOWEST, x - 10) for name, x in drawn.items()},
        }

    @property
    def _token(self) -> int:
        """The placeholder's token id; if attention reads pictures without placeholders, a token that is never drawn."""
        fields = self.config.to_dict()
        names = [name for name in PLACEHOLDERS if isinstance(fields.get(name), int)]
        return int(fields[names[0]]) if names else IMAGE_TOKEN

    def _placed(self, batch: Batch, rows: int) -> Batch:
        """Return the text with ``rows`` placeholders inserted; labels of placeholders are ignored."""
        fill = {"input_ids": self._token, "labels": -100, "attention_mask": 1}
        return {
            name: torch.cat(
                [
                    value[:, :2],
                    value.new_full((len(value), rows), fill[name]),
                    value[:, 2:],
                ],
                dim=1,
            )
            for name, value in batch.items()
        }

    def _typed(self, batch: Batch) -> Batch:
        """Return a batch with the further inputs that the model's class takes (token types, boxes), and without inputs
        that it does not take.
        """
        given = self._arguments
        ids = batch["input_ids"]
        typed = {
            **batch,
            **{name: (ids == self._token).long() for name in _PLACED if name in given},
        }
        if "image_attention_mask" in given:  # [samples, tokens, pictures]
            typed["image_attention_mask"] = torch.ones(*ids.shape, 1, dtype=torch.long)
        if "bbox" in given:  # a token's box on its page
            corner = torch.arange(ids.shape[1], dtype=torch.float64) / (2 * ids.shape[1])
            typed["bbox"] = torch.stack(
                [corner, corner, corner + 0.3, corner + 0.4], dim=-1
            ).expand(len(ids), -1, -1)
        left_out = LABELS_ONLY.get(self.config.model_type, ())
        return {
            name: value for name, value in typed.items() if name in given and name not in left_out
        }

    @property
    def _arguments(self) -> Any:
        kind = classes_by_config(AutoModelForImageTextToText)[type(self.config)]
        return inspect.signature(kind.forward).parameters

    def _rows(self, picture: dict[str, Tensor]) -> int:
        """Return the number of features per picture; 0 if attention reads them without placeholders."""
        fields = self.config.to_dict()
        if not {*PLACEHOLDERS} & fields.keys():
            return int(fields.get("latent_query_num", 0))
        key = self.config.to_json_string(use_diff=False)
        if key not in _ROWS:
            _ROWS[key] = _count_features(self.config, picture)
        return _ROWS[key]


@dataclass
class PlainPictureCase(PictureCase, PlainCase):
    """Define a parity case with pictures in which the model's class computes the loss, and a plain loop (no Trainer)
    trains.
    """


def _count_features(config: Any, picture: dict[str, Tensor]) -> int:
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()
    use_eager_experts(model)
    parts = (model, model.base_model)
    makers = (
        getattr(part, f"get_{kind}_features", None) for kind in ("image", "video") for part in parts
    )
    maker = next((maker for maker in makers if maker is not None), None)
    if maker is None:
        return 0
    taken = inspect.signature(maker).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    with torch.no_grad(), keep_float64():
        made = maker(
            **{name: value for name, value in picture.items() if anything or name in taken}
        )
    if not isinstance(made, (Tensor, tuple, list)):
        made = _features_in(made)
    each = [made] if isinstance(made, Tensor) else list(made)
    return sum(features.numel() // features.shape[-1] for features in each)


def _features_in(output: Any) -> Any:
    """Return the features that replace picture placeholders in the text, from the output of the vision tower."""
    if getattr(output, "pooler_output", None) is not None:
        return output.pooler_output
    if getattr(output, "deepstack_features", None) is not None:  # (layer, features to add)
        return output.deepstack_features[0][1]
    return output.last_hidden_state


def make_picture(config: Any, given: Any, generator: torch.Generator) -> Picture:
    """Return a picture in the format of a class with the inputs ``given``; a batch concatenates pictures
    along dim 0.
    """
    way = next((name for name in _WAYS if name in given or hasattr(config, name)), "")
    vision = vision_part(config)
    channels = int(getattr(vision, "num_channels", 0) or getattr(vision, "in_channels", 3))

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    patches = _patches(way, config, vision, channels, noise)
    if patches is not None:
        merged = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in given else {}
        return {**patches, **merged} if way == "image_grid_thw" else patches
    return _squares(way, config, vision, channels, noise)


def join_pictures(pictures: list[Picture]) -> Picture:
    """Concatenate the pictures of a batch."""
    if "image_token_pooling" in pictures[0]:  # indices into the patches of the full batch
        patches = pictures[0]["pixel_values"].shape[1]
        pictures = [
            {**picture, "image_token_pooling": picture["image_token_pooling"] + patches * index}
            for index, picture in enumerate(pictures)
        ]
    sides = {"pixel_values": -1} if "target_sizes" in pictures[0] else {}  # patches side by side
    return {
        name: torch.cat(
            [each[name] for each in pictures],
            dim=sides.get(name, 0),
        )
        for name in pictures[0]
    }


def vision_part(config: Any) -> Any:
    """Return the config of the vision tower, nested in ``config``, which has the size of pictures."""
    for name in ("vision_config", "vlm_config", "vq_config", "encoder"):
        inside = getattr(config, name, None)
        if inside is not None:
            return vision_part(inside) if name in ("vlm_config", "encoder") else inside
    return config


def _patches(
    way: str,
    config: Any,
    vision: Any,
    channels: int,
    noise: _Noise,
) -> Picture | None:
    """Return a picture as patches with positions, for families that take patches; ``None`` for other families.

    ``way`` is the input or config field by which the family's format was recognized.
    """
    sides = torch.tensor([[GRID, GRID]])
    width = channels * PATCH**2
    match way:
        case "image_grid_thw":  # patches of all pictures along one dim
            if vision.model_type == "inkling2_vision":  # all patches of a token form a square
                side = PATCH * vision.spatial_merge_size
                tokens = GRID // vision.spatial_merge_size
                grid = torch.tensor([[1, tokens, tokens]])
                return {
                    "pixel_values": noise(tokens**2, side, side, channels),
                    "image_grid_thw": grid,
                }
            times = getattr(vision, "temporal_patch_size", 0) or getattr(
                vision, "patch_temporal", 1
            )
            square = any(word in config.model_type for word in ("kimi", "paddleocr"))
            shape = (channels, PATCH, PATCH) if square else (times * width,)
            return {
                "pixel_values": noise(GRID**2, *shape),
                "image_grid_thw": torch.tensor([[1, GRID, GRID]]),
            }
        case "image_grid_hw":
            return {"pixel_values": noise(GRID**2, width), "image_grid_hw": sides}
        case "spatial_shapes":
            room = {"pixel_attention_mask": torch.ones(1, GRID**2, dtype=torch.long)}
            return {"pixel_values": noise(1, GRID**2, width), "spatial_shapes": sides, **room}
        case "target_sizes":  # patches are concatenated along the last dim
            return {
                "pixel_values": noise(1, channels, PATCH, GRID**2 * PATCH),
                "target_sizes": sides.int(),
            }
        case "image_position_ids":
            pooled = vision.model_type.endswith("unified_vision")
            side = PATCH * int(getattr(vision, "pooling_kernel_size", 1) if pooled else 1)
            places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).flip(-1)
            return {
                "pixel_values": noise(1, GRID**2, channels * side**2),
                "image_position_ids": places[None],
            }
        case "image_token_pooling":  # the indices of patches that are pooled into each token
            tokens = torch.arange(GRID**2).view(GRID**2 // 4, 4)
            grids = torch.tensor([[2, GRID // 2, 0, 0]])
            return {
                "pixel_values": noise(1, GRID**2, width),
                "image_token_pooling": tokens,
                "image_grids": grids,
            }
        case "flattened_patches":  # each patch begins with its row and column, from 1
            places = 1.0 + torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).double()
            return {"flattened_patches": torch.cat([places, noise(GRID**2, width)], dim=1)[None]}
        case "image_patches":
            return {"pixel_values": noise(1, GRID**2, width)}
    return None


def _squares(
    way: str,
    config: Any,
    vision: Any,
    channels: int,
    noise: _Noise,
) -> Picture:
    """Return a picture as pixels, for families that take pixels; ``way`` is the input or config field by which the
    family's format was recognized.
    """
    square = (channels, SIDE, SIDE)
    match way:
        case (
            "qformer_input_ids"
        ):  # with a question; a video of four frames if the config is for videos
            asked = 3 + (noise(1, 5).abs() * 20).long() % 50
            frames = (4,) if hasattr(config, "video_token_index") else ()
            return {"pixel_values": noise(1, *frames, *square), "qformer_input_ids": asked}
        case "aspect_ratio_ids":  # [samples, pictures, tiles, ...]
            ones = torch.ones(1, 1, 1, dtype=torch.long)
            return {
                "pixel_values": noise(1, 1, 1, *square),
                "aspect_ratio_ids": ones[0],
                "aspect_ratio_mask": ones,
            }
        case "high_res_pixel_values":
            large = config.high_res_vision_config.image_size
            return {
                "pixel_values": noise(1, *square),
                "high_res_pixel_values": noise(1, channels, large, large),
            }
        case "state":  # a robot's state and views, its actions, and the noise of flow matching
            views = {
                "pixel_values": noise(1, 1, *square),
                "pixel_attention_mask": torch.ones(1, 1).bool(),
            }
            moves = (1, config.chunk_size, config.max_action_dim)
            times = noise(1).sigmoid()
            robot = {
                "state": noise(1, config.max_state_dim),
                "actions": noise(*moves),
                "noise": noise(*moves),
            }
            return {**views, **robot, "timestep": times}
        case "tile_fine_mask":
            return {
                "pixel_values": noise(1, 1, *square),
                "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
            }
        case "pixel_attention_mask" | "image_attention_mask":  # [samples, pictures, ...]
            return {"pixel_values": noise(1, 1, *square)}
        case "image_grid_pinpoints":  # the picture and two tiles of it
            return {
                "pixel_values": noise(1, 3, *square),
                "image_sizes": torch.tensor([[2 * SIDE, SIDE]]),
            }
    sized = vision.model_type in ("pixtral", "emu3_vqgan")
    sizes = {"image_sizes": torch.tensor([[SIDE, SIDE]])} if sized else {}
    side = getattr(getattr(vision, "sam_config", vision), "image_size", SIDE)
    side = side if isinstance(side, int) else side[0]
    return {"pixel_values": noise(1, channels, side, side), **sizes}
