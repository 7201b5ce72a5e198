"""Parameters that a checkpoint holds as one are written together, whoever holds their shares."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hfscale import ParallelConfig
from hfscale._host.transformers.saving import AsStored
from hfscale.testing import RankPool, assert_layout_equal
from hfscale.testing.pictures import PictureCase, with_pictures

Pools = Callable[[int], RankPool]


def test_the_last_one_brings_them() -> None:
    model = AutoModelForImageTextToText.from_config(with_pictures("qianfan_ocr"), dtype=torch.float32)
    contents = {name: parameter.detach() for name, parameter in model.named_parameters()}
    stored = AsStored(model, {name: value.to("meta") for name, value in contents.items()})
    made: dict[str, dict[str, Any]] = {name: stored.made_of(name, value) for name, value in contents.items()}
    tower = "model.vision_tower.layers.0.attention"
    assert made[f"{tower}.q_proj.weight"] == made[f"{tower}.k_proj.weight"] == {}
    ((key, fused),) = made[f"{tower}.v_proj.weight"].items()
    assert key.endswith("qkv.weight")
    assert torch.equal(fused, torch.cat([contents[f"{tower}.{part}_proj.weight"] for part in "qkv"]))
    assert {name: value.shape for each in made.values() for name, value in each.items()} == {
        name: value.shape for name, value in stored.layout.items()
    }


@pytest.mark.parametrize("axis", ["tp_size", "dp_shard_size"])
def test_ranks_write_what_one_process_does(pools: Pools, axis: str) -> None:
    assert_layout_equal(PictureCase(with_pictures("qianfan_ocr")), ParallelConfig(**{axis: 2}), pools(2))
