"""Make one picture in a family's format, recognized by the inputs of its forward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .picture_configs import GRID, PATCH, SIDE

Picture = dict[str, Tensor]
_Noise = Callable[..., Tensor]
_PLACED = ("token_type_ids", "mm_token_type_ids", "image_embeds_position_mask")
"""Inputs that distinguish placeholders from text."""


def make_picture(config: Any, given: Any, generator: torch.Generator) -> Picture:
    """Return a picture for a class that takes the ``given`` inputs; a batch concatenates them along their first dim."""
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
    return {name: torch.cat([each[name] for each in pictures], dim=sides.get(name, 0)) for name in pictures[0]}


def vision_part(config: Any) -> Any:
    """Return the nested config with the size of pictures."""
    for name in ("vision_config", "vlm_config", "vq_config", "encoder"):
        inside = getattr(config, name, None)
        if inside is not None:
            return vision_part(inside) if name in ("vlm_config", "encoder") else inside
    return config


def beside_text(given: Any, ids: Tensor, token: int) -> Picture:
    """Return the inputs beside a text: positions of its placeholders, and its attention to pictures."""
    found = {name: (ids == token).long() for name in _PLACED if name in given}
    if "image_attention_mask" in given:  # [samples, tokens, pictures]
        found["image_attention_mask"] = torch.ones(*ids.shape, 1, dtype=torch.long)
    if "bbox" in given:  # the place of a token on its page
        corner = torch.arange(ids.shape[1], dtype=torch.float64) / (2 * ids.shape[1])
        found["bbox"] = torch.stack([corner, corner, corner + 0.3, corner + 0.4], dim=-1).expand(len(ids), -1, -1)
    return found


def _patches(way: str, config: Any, vision: Any, channels: int, noise: _Noise) -> Picture | None:
    """Return a picture as patches with their positions, for families that take patches; else ``None``."""
    sides, width = torch.tensor([[GRID, GRID]]), channels * PATCH**2
    match way:
        case "image_grid_thw":  # all pictures of a batch are packed into one dim
            if vision.model_type == "inkling2_vision":  # squares of all patches of a token
                side, tokens = PATCH * vision.spatial_merge_size, GRID // vision.spatial_merge_size
                grid = torch.tensor([[1, tokens, tokens]])
                return {"pixel_values": noise(tokens**2, side, side, channels), "image_grid_thw": grid}
            times = getattr(vision, "temporal_patch_size", 0) or getattr(vision, "patch_temporal", 1)
            square = any(word in config.model_type for word in ("kimi", "paddleocr"))
            shape = (channels, PATCH, PATCH) if square else (times * width,)
            return {"pixel_values": noise(GRID**2, *shape), "image_grid_thw": torch.tensor([[1, GRID, GRID]])}
        case "image_grid_hw":
            return {"pixel_values": noise(GRID**2, width), "image_grid_hw": sides}
        case "spatial_shapes":
            room = {"pixel_attention_mask": torch.ones(1, GRID**2, dtype=torch.long)}
            return {"pixel_values": noise(1, GRID**2, width), "spatial_shapes": sides, **room}
        case "target_sizes":  # side by side, along the last dim
            return {"pixel_values": noise(1, channels, PATCH, GRID**2 * PATCH), "target_sizes": sides.int()}
        case "image_position_ids":
            pooled = vision.model_type.endswith("unified_vision")
            side = PATCH * int(getattr(vision, "pooling_kernel_size", 1) if pooled else 1)
            places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).flip(-1)
            return {"pixel_values": noise(1, GRID**2, channels * side**2), "image_position_ids": places[None]}
        case "image_token_pooling":  # the indices of patches that are pooled into each token
            tokens = torch.arange(GRID**2).view(GRID**2 // 4, 4)
            grids = torch.tensor([[2, GRID // 2, 0, 0]])
            return {"pixel_values": noise(1, GRID**2, width), "image_token_pooling": tokens, "image_grids": grids}
        case "flattened_patches":  # which begin with their row and their column, counted from one
            places = 1.0 + torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).double()
            return {"flattened_patches": torch.cat([places, noise(GRID**2, width)], dim=1)[None]}
        case "image_patches":
            return {"pixel_values": noise(1, GRID**2, width)}
    return None


def _squares(way: str, config: Any, vision: Any, channels: int, noise: _Noise) -> Picture:
    """Return a picture as pixels, for families that take pixels."""
    square = (channels, SIDE, SIDE)
    match way:
        case "qformer_input_ids":  # with a question; a video of four frames if the config is for videos
            asked = 3 + (noise(1, 5).abs() * 20).long() % 50
            frames = (4,) if hasattr(config, "video_token_index") else ()
            return {"pixel_values": noise(1, *frames, *square), "qformer_input_ids": asked}
        case "aspect_ratio_ids":  # [samples, pictures, tiles, ...]
            ones = torch.ones(1, 1, 1, dtype=torch.long)
            return {"pixel_values": noise(1, 1, 1, *square), "aspect_ratio_ids": ones[0], "aspect_ratio_mask": ones}
        case "high_res_pixel_values":
            large = config.high_res_vision_config.image_size
            return {"pixel_values": noise(1, *square), "high_res_pixel_values": noise(1, channels, large, large)}
        case "state":  # a robot's state and views, its actions, and the noise of flow matching
            views = {"pixel_values": noise(1, 1, *square), "pixel_attention_mask": torch.ones(1, 1).bool()}
            moves, times = (1, config.chunk_size, config.max_action_dim), noise(1).sigmoid()
            robot = {"state": noise(1, config.max_state_dim), "actions": noise(*moves), "noise": noise(*moves)}
            return {**views, **robot, "timestep": times}
        case "tile_fine_mask":
            return {"pixel_values": noise(1, 1, *square), "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}
        case "pixel_attention_mask" | "image_attention_mask":  # [samples, pictures, ...]
            return {"pixel_values": noise(1, 1, *square)}
        case "image_grid_pinpoints":  # with two tiles of it
            return {"pixel_values": noise(1, 3, *square), "image_sizes": torch.tensor([[2 * SIDE, SIDE]])}
    sized = vision.model_type in ("pixtral", "emu3_vqgan")
    sizes = {"image_sizes": torch.tensor([[SIDE, SIDE]])} if sized else {}
    side = getattr(getattr(vision, "sam_config", vision), "image_size", SIDE)
    side = side if isinstance(side, int) else side[0]
    return {"pixel_values": noise(1, channels, side, side), **sizes}


_WAYS = (
    *("image_grid_thw", "image_grid_hw", "spatial_shapes", "target_sizes", "qformer_input_ids", "image_position_ids"),
    *("aspect_ratio_ids", "image_token_pooling", "flattened_patches", "high_res_pixel_values", "state"),
    *("tile_fine_mask", "pixel_attention_mask", "image_attention_mask", "image_grid_pinpoints", "image_patches"),
)
"""The first of these that is an input of the class, or a field of its config, says how it takes pictures."""
