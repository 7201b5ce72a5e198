"""What several ranks hold together is compared: whatever clips or steps each rank by itself is not saved."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.testing import RankPool
from hfscale.train.guards import replicas
from hfscale.train.guards.replicas import checksum
from hfscale.train.runtime import runtime_of

from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
SP = {"sequence_parallel": True}
LORA = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


STOCK_CLIPPING = inspect.unwrap(torch.nn.utils.clip_grad_norm_)


def build(layout: dict[str, Any], **kwargs: Any) -> Any:
    changes = kwargs.pop("config", {})
    return hfscale.from_config(
        tiny("llama", **changes), parallel=ParallelConfig(**layout), **kwargs
    ).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 67, (4, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def train(layout: dict[str, Any], clip: str, steps: int, directory: str) -> str:
    """A loop; the first complaint, or an empty string."""
    model = build(layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    try:
        for _ in range(steps):
            hfscale.train_step(model, batch())
            if clip == "torch":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif clip == "imported before":
                STOCK_CLIPPING(model.parameters(), 0.1)
            elif clip == "scaler":
                torch.amp.GradScaler("cpu", enabled=False).unscale_(optimizer)
                scaler = torch.amp.GradScaler("cpu")
                scaler.scale(torch.zeros(()))
                scaler.unscale_(optimizer)
            else:
                hfscale.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        hfscale.save_state(model, f"{directory}/state", optimizer=optimizer)
        hfscale.save_pretrained(model, f"{directory}/weights")
    except hfscale.HFScaleError as error:
        return str(error)
    return ""


@pytest.mark.daily("2-layout0")
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}])
@pytest.mark.parametrize("steps", [2, 10])
def test_stock_clipping_is_found(
    pools: Pools, layout: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    found = pools(2).run(train, layout, "imported before", steps, str(tmp_path))
    if layout == {"pp_size": 2}:  # nothing is held twice
        assert found == ["", ""]
        return
    for message in found:
        assert "norm.weight is not the same on all ranks that hold it together" in message
        assert "hfscale.clip_grad_norm_(model, max_norm)" in message
        assert ("save_state(" in message) == (steps == 2)  # else a step has seen it
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}, {"dp_shard_size": 2}])
@pytest.mark.parametrize(
    ("clip", "instead"),
    [
        ("torch", "use hfscale.clip_grad_norm_(model, max_norm)"),
        ("scaler", 'with mixed_precision="fp16"'),
    ],
)
def test_stock_clipping_and_scaling_are_refused(
    pools: Pools, layout: dict[str, Any], clip: str, instead: str, tmp_path: Path
) -> None:
    """At the first call; over sharded data alone torch knows all of it."""
    refused = instead if layout != {"dp_shard_size": 2} else ""
    for message in pools(2).run(train, layout, clip, 1, str(tmp_path)):
        assert refused in message
        assert bool(message) == bool(refused)


@pytest.mark.daily("layout2")
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"dp_replicate_size": 2}, {"tp_size": 2, **SP}])
def test_right_loops_are_left_alone(pools: Pools, layout: dict[str, Any], tmp_path: Path) -> None:
    assert pools(2).run(train, layout, "hfscale", 10, str(tmp_path)) == ["", ""]


def spoil(
    layout: dict[str, Any], name: str, kwargs: dict[str, Any], directory: str
) -> tuple[str, str]:
    """What saving says with one bit of the last entry of ``name`` turned on the last rank, and with no check."""
    model = build(layout, **kwargs)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        held = {planned.name: parameter for planned, parameter in runtime_of(model).parameters()}
        local = held[name].data.view(-1)
        bits = (local.to_local() if hasattr(local, "to_local") else local).view(torch.uint8)
        bits[-4] ^= 1
    try:
        hfscale.save_pretrained(model, directory)
        message = ""
    except hfscale.CheckpointError as error:
        message = str(error)
    hfscale.save_pretrained(model, f"{directory}-unchecked", check_replicas=False)
    return message, str(runtime_of(model).mesh.ranks)


SPOILT: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "norms": ({"tp_size": 2}, "model.norm.weight", {}, "0; 1"),
    "replicas": ({"dp_replicate_size": 2}, "model.layers.1.mlp.up_proj.weight", {}, "0; 1"),
    "replicas of shards": (
        {"dp_replicate_size": 2, "dp_shard_size": 2}, "model.layers.1.mlp.up_proj.weight", {}, "1; 3",
    ),
    "key/value heads": (
        {"tp_size": 4}, "model.layers.0.self_attn.v_proj.weight", {"config": {"num_key_value_heads": 2}}, "2; 3",
    ),
    "factors": ({"tp_size": 2}, "model.layers.0.self_attn.q_proj.lora_A.default.weight", {"peft_config": LORA}, "0; 1"),
    "a tied head": ({"pp_size": 2}, "model.embed_tokens.weight", {"config": {"tie_word_embeddings": True}}, "0; 1"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILT)
def test_one_bit_is_found(pools: Pools, kind: str, tmp_path: Path) -> None:
    layout, name, kwargs, ranks = SPOILT[kind]
    world = ParallelConfig(**layout).total_size
    for message, _ in pools(world).run(spoil, layout, name, kwargs, str(tmp_path / "out")):
        assert (
            f"{name} is not the same on all ranks that hold it together (it differs between ranks {ranks})"
            in message
        )
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out-unchecked").exists()


def drift(by: float) -> str:
    """What a check that allows for roundings says of one norm that is ``by`` larger on the last rank."""
    model = build({"tp_size": 2})
    if torch.distributed.get_rank() == 1:
        model.model.norm.weight.data[3] *= 1 + by
    try:
        with patch.dict(replicas._TOLERANCES, cpu=1e-3):
            replicas.check_replicas(runtime_of(model))
    except hfscale.ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("by", "refused"), [(1e-5, False), (1e-2, True), (float("nan"), True)])
def test_roundings_are_allowed_where_kernels_differ(pools: Pools, by: float, refused: bool) -> None:
    for message in pools(2).run(drift, by):
        assert ("model.norm.weight is not the same on all ranks" in message) == refused


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.int8]
)
@pytest.mark.parametrize("size", [(), (3,), (5, 7), (130, 257)])
def test_checksums(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    tensor = torch.randint(0, 100, size, generator=generator).to(dtype)
    assert int(checksum(tensor)) == int(checksum(tensor.clone()))
    for index in {0, tensor.numel() // 2, tensor.numel() - 1}:
        other = tensor.clone()
        other.view(-1)[index] += 1
        assert int(checksum(tensor)) != int(checksum(other))
        if index:  # an equal and opposite change elsewhere
            other.view(-1)[0] -= 1
            assert int(checksum(tensor)) != int(checksum(other))
    if dtype.is_floating_point:
        nan = tensor * float("nan")
        assert int(checksum(nan)) == int(checksum(nan.clone()))
    wide = torch.stack([tensor, tensor + 1], -1)
    assert int(checksum(wide[..., 0])) == int(checksum(tensor))  # not contiguous
