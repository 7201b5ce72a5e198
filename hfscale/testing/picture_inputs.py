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
    """Return a picture; pictures of a batch are concatenated along their first dim.

    Args:
        given: names of the inputs that the class takes.
        generator: generator of its values.
    """
    vision = vision_part(config)
    channels = int(getattr(vision, "num_channels", 0) or getattr(vision, "in_channels", 3))

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    way = next((make for name, make in _WAYS.items() if name in given or hasattr(config, name)), _square)
    return way(config, vision, given, channels, noise)


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


def _packed(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make patches, with all pictures of a batch packed into one dim."""
    square = any(word in config.model_type for word in ("kimi", "paddleocr"))
    times = getattr(vision, "temporal_patch_size", 0) or getattr(vision, "patch_temporal", 1)
    width = channels * times * PATCH**2
    if vision.model_type == "inkling2_vision":  # squares of all patches of a token
        side = PATCH * vision.spatial_merge_size
        tokens = GRID // vision.spatial_merge_size
        grid = torch.tensor([[1, tokens, tokens]])
        return {"pixel_values": noise(tokens**2, side, side, channels), "image_grid_thw": grid}
    shape = (channels, PATCH, PATCH) if square else (width,)
    merged = {"image_merge_sizes": torch.tensor([2])} if "image_merge_sizes" in given else {}
    return {"pixel_values": noise(GRID**2, *shape), "image_grid_thw": torch.tensor([[1, GRID, GRID]]), **merged}


def _packed_flat(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    return {"pixel_values": noise(GRID**2, channels * PATCH**2), "image_grid_hw": torch.tensor([[GRID, GRID]])}


def _shaped(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    room = {"pixel_attention_mask": torch.ones(1, GRID**2, dtype=torch.long)}
    sides = torch.tensor([[GRID, GRID]])
    return {"pixel_values": noise(1, GRID**2, channels * PATCH**2), "spatial_shapes": sides, **room}


def _side_by_side(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make patches side by side; pictures are concatenated along their last dim."""
    sides = torch.tensor([[GRID, GRID]], dtype=torch.int32)
    return {"pixel_values": noise(1, channels, PATCH, GRID**2 * PATCH), "target_sizes": sides}


def _asked_about(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make a picture with a question; a video of four frames if the config is for videos."""
    asked = 3 + (noise(1, 5).abs() * 20).long() % 50
    frames = (4,) if hasattr(config, "video_token_index") else ()
    return {"pixel_values": noise(1, *frames, channels, SIDE, SIDE), "qformer_input_ids": asked}


def _placed_patches(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    side = PATCH * int(getattr(vision, "pooling_kernel_size", 1) if vision.model_type.endswith("unified_vision") else 1)
    places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).flip(-1)
    return {"pixel_values": noise(1, GRID**2, channels * side**2), "image_position_ids": places[None]}


def _tiles(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make a picture of shape ``[samples, pictures, tiles, ...]``."""
    ones = torch.ones(1, 1, 1, dtype=torch.long)
    picture = noise(1, 1, 1, channels, SIDE, SIDE)
    return {"pixel_values": picture, "aspect_ratio_ids": ones[0], "aspect_ratio_mask": ones}


def _of_sample(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make a picture of shape ``[samples, pictures, ...]``."""
    return {"pixel_values": noise(1, 1, channels, SIDE, SIDE)}


def _masked_tiles(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    real = torch.ones(1, 1, dtype=torch.bool)
    return {"pixel_values": noise(1, 1, channels, SIDE, SIDE), "pixel_attention_mask": real}


def _with_pinpoints(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make a picture with two tiles of it."""
    return {"pixel_values": noise(1, 3, channels, SIDE, SIDE), "image_sizes": torch.tensor([[2 * SIDE, SIDE]])}


def _numbered(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make patches that begin with their row and their column, counted from one."""
    places = 1.0 + torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).double()
    return {"flattened_patches": torch.cat([places, noise(GRID**2, channels * PATCH**2)], dim=1)[None]}


def _twice(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    large = config.high_res_vision_config.image_size
    picture = noise(1, channels, SIDE, SIDE)
    return {"pixel_values": picture, "high_res_pixel_values": noise(1, channels, large, large)}


def _pooled(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make patches, with the indices of those that are pooled into each token."""
    tokens = torch.arange(GRID**2).view(GRID**2 // 4, 4)
    grids = torch.tensor([[2, GRID // 2, 0, 0]])
    picture = noise(1, GRID**2, channels * PATCH**2)
    return {"pixel_values": picture, "image_token_pooling": tokens, "image_grids": grids}


def _robot(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make a robot's state and views, its actions, and the noise of flow matching."""
    moves = (1, config.chunk_size, config.max_action_dim)
    views = {"pixel_values": noise(1, 1, channels, SIDE, SIDE), "pixel_attention_mask": torch.ones(1, 1).bool()}
    times = noise(1).sigmoid()
    return {**views, "state": noise(1, config.max_state_dim), "actions": noise(*moves), "noise": noise(*moves),
        "timestep": times}  # fmt: skip


def _flat(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    """Make the flattened patches of one picture."""
    return {"pixel_values": noise(1, GRID**2, channels * PATCH**2)}


def _square(config: Any, vision: Any, given: Any, channels: int, noise: _Noise) -> Picture:
    sized = vision.model_type in ("pixtral", "emu3_vqgan")
    sizes = {"image_sizes": torch.tensor([[SIDE, SIDE]])} if sized else {}
    side = getattr(getattr(vision, "sam_config", vision), "image_size", SIDE)
    side = side if isinstance(side, int) else side[0]
    return {"pixel_values": noise(1, channels, side, side), **sizes}


# The first key that is an input of the class, or a field of its config, decides.
_WAYS: dict[str, Callable[[Any, Any, Any, int, _Noise], Picture]] = {
    "image_grid_thw": _packed,
    "image_grid_hw": _packed_flat,
    "spatial_shapes": _shaped,
    "target_sizes": _side_by_side,
    "qformer_input_ids": _asked_about,
    "image_position_ids": _placed_patches,
    "aspect_ratio_ids": _tiles,
    "image_token_pooling": _pooled,
    "flattened_patches": _numbered,
    "high_res_pixel_values": _twice,
    "state": _robot,
    "tile_fine_mask": _masked_tiles,
    "pixel_attention_mask": _of_sample,
    "image_attention_mask": _of_sample,
    "image_grid_pinpoints": _with_pinpoints,
    "image_patches": _flat,
}
