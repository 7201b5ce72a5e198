"""Checkpoints that bitsandbytes stored in 4 bits: a rank reads spans of the bytes, and quantizes nothing."""

from collections.abc import Callable
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig
from hfscale.features.quantization.quantized_modules import dequantized
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.parameter_names import owner_of

from .models import Layout, four_bits, local_share, save, stock, through, wide

Pools = Callable[[int], RankPool]

LAYOUTS: dict[str, Layout] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "shard2": {"dp_shard_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
}


def compare(path: str, layout: Layout, whole: dict[str, Tensor]) -> int:
    """How many weights are here; every one is the stored one, bit by bit."""
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), dtype=torch.float32)
    runtime = runtime_of(model)
    count = 0
    assert runtime.plan.quantized is not None
    for name in filter(runtime.is_local, runtime.plan.quantized.weights):
        module, attribute = owner_of(model, name)
        assert isinstance(module, bnb.nn.Linear4bit)
        assert torch.equal(
            dequantized(module, attribute), local_share(runtime, name, whole[name])
        ), name
        count += 1
    if "pp_size" not in layout and "tp_size" not in layout:
        found = through(model.train(), 256)
        assert torch.equal(found[0], whole["logits"])
        assert torch.equal(found[1], whole["gradient"])
    return count


@pytest.mark.daily("gpt2-double-tp2-shard2", "bf16-shard2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "double", "storage"),
    [
        ("llama", False, torch.uint8),
        ("llama", True, torch.uint8),
        ("llama", False, torch.bfloat16),
        ("phi3", False, torch.uint8),
        ("gpt2", True, torch.uint8),
    ],
    ids=["llama", "double", "bf16", "phi3", "gpt2-double"],
)
def test_stored_weights(
    pools: Pools, tmp_path: Path, family: str, double: bool, storage: torch.dtype, layout: str
) -> None:
    config = four_bits(double=double, bnb_4bit_quant_storage=storage)
    model = stock(save(wide(family), tmp_path / "plain"), config).train()
    model.save_pretrained(tmp_path / "stored")
    whole = {
        f"{name}.weight": dequantized(module)
        for name, module in model.named_modules()
        if isinstance(module, bnb.nn.Linear4bit)
    }
    number = len(whole)
    whole["logits"], whole["gradient"] = through(model, 256)
    world = ParallelConfig(**LAYOUTS[layout]).total_size
    path = str(tmp_path / "stored")
    if world == 1:
        counts = [compare(path, LAYOUTS[layout], whole)]
    else:
        counts = pools(world).run(compare, path, LAYOUTS[layout], whole)
    assert counts == [number // 2 if "pp" in layout else number] * world


def refused(path: str) -> str:
    with pytest.raises(CheckpointError) as error:
        hfscale.from_pretrained(path, parallel=ParallelConfig(tp_size=2))
    return str(error.value)


def test_what_does_not_align_is_refused(pools: Pools, tmp_path: Path) -> None:
    config = wide("llama", intermediate_size=192)
    stock(save(config, tmp_path / "plain"), four_bits()).save_pretrained(tmp_path / "stored")
    for message in pools(2).run(refused, str(tmp_path / "stored")):
        assert (
            "model.layers.*.mlp.down_proj.weight is stored in 4 bits and cannot be sharded"
            in message
        )
        assert (
            "use smaller tp_size and dp_shard_size, or a checkpoint with 16-bit weights" in message
        )
    table = str(hfscale.plan(tmp_path / "stored", ParallelConfig(tp_size=2)))
    assert (
        "4-bit blocks of 2 weights do not align with their shards: they cannot be loaded" in table
    )
    with pytest.raises(
        ConfigError, match="a checkpoint that is quantized already: leave quantization_config out"
    ):
        hfscale.from_pretrained(tmp_path / "stored", quantization_config=four_bits())
