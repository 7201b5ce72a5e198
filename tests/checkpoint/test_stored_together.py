"""Parameters that a checkpoint holds as one are written together, whoever holds their shares."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hfscale import ParallelConfig
from hfscale._compat.transformers.stored import AsStored
from hfscale.extras.pictures.picture_configs import with_pictures
from hfscale.extras.pictures.picture_parity import PictureCase
from hfscale.testing import RankPool, assert_layout_equal

Pools = Callable[[int], RankPool]


def test_the_last_one_brings_them() -> None:
    model = AutoModelForImageTextToText.from_config(
        with_pictures("qianfan_ocr"), dtype=torch.float32
    )
    contents = {name: parameter.detach() for name, parameter in model.named_parameters()}
    stored = AsStored(model, {name: value.to("meta") for name, value in contents.items()})
    made: dict[str, dict[str, Any]] = {
        name: stored.made_of(name, value) for name, value in contents.items()
    }
    tower = "model.vision_tower.layers.0.attention"
    assert made[f"{tower}.q_proj.weight"] == made[f"{tower}.k_proj.weight"] == {}
    ((key, fused),) = made[f"{tower}.v_proj.weight"].items()
    assert key.endswith("qkv.weight")
    assert torch.equal(
        fused, torch.cat([contents[f"{tower}.{part}_proj.weight"] for part in "qkv"])
    )
    assert {name: value.shape for each in made.values() for name, value in each.items()} == {
        name: value.shape for name, value in stored.layout.items()
    }


@pytest.mark.daily("tp_size")
@pytest.mark.parametrize("axis", ["tp_size", "dp_shard_size"])
def test_ranks_write_what_one_process_does(pools: Pools, axis: str) -> None:
    assert_layout_equal(
        PictureCase(with_pictures("qianfan_ocr")), ParallelConfig(**{axis: 2}), pools(2)
    )


def test_a_share_is_not_taken_for_a_transposed_tensor() -> None:
    """The host transposes experts whose shape is not that of the parameter it finds, and that may be a share."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(with_pictures("qwen3_vl_moe"))
    contents = {name: parameter.detach() for name, parameter in model.named_parameters()}
    wanted = {name: tensor.shape for name, tensor in AsStored(model, contents).layout.items()}
    experts = model.get_submodule("model.language_model.layers.1.mlp.experts")
    for name, dim in (("gate_up_proj", 1), ("down_proj", 2)):
        share = getattr(experts, name).detach().chunk(2, dim)[0]
        setattr(experts, name, torch.nn.Parameter(share))
    stored = AsStored(model, contents)
    assert {name: tensor.shape for name, tensor in stored.layout.items()} == wanted


def test_two_mixtures_that_are_stored_as_one() -> None:
    """ERNIE VL has experts for text and for pictures, stored as one list; the host makes it of both, or refuses."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(with_pictures("ernie4_5_vl_moe"))
    stored = AsStored(
        model, {name: parameter.detach() for name, parameter in model.named_parameters()}
    )
    experts = [
        name
        for name in stored.layout
        if "layers.1.mlp.experts." in name and name.endswith("down_proj.weight")
    ]
    assert len(experts) == 2 * model.config.text_config.moe_num_experts


def test_what_is_renamed_only_behind_another() -> None:
    """Kimi's tower stores its norms as norm0 and norm1; alone, the host takes norm2 for one that is stored so."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(with_pictures("kimi_k25"))
    stored = AsStored(
        model, {name: parameter.detach() for name, parameter in model.named_parameters()}
    )
    norms = {name.rpartition("norm")[2] for name in stored.layout if ".blocks.1.norm" in name}
    assert norms == {"0.weight", "0.bias", "1.weight", "1.bias"}
