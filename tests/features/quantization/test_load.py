"""A base in 4 bits, loaded in any layout: the same values as in one process wherever the plan says so (trap T23)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig

import hfscale
from hfscale import ConfigError, ParallelConfig, PlanError
from hfscale.plan import Cut
from hfscale.plan.quantized import matrix_blocks_align
from hfscale.testing import RankPool

from ...tiny_models import tiny
from .models import Layout, compare_weights, four_bits, leaves, load, save, stock, through, wide

Pools = Callable[[int], RankPool]

LAYOUTS: dict[str, Layout] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2},
    "shard2": {"dp_shard_size": 2},
    "replicate2": {"dp_replicate_size": 2},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "pp2-tp2": {"pp_size": 2, "tp_size": 2},
    "replicate2-shard2": {"dp_replicate_size": 2, "dp_shard_size": 2},
}


def on_ranks(pools: Pools, layout: Layout, function: Callable[..., Any], *args: Any) -> list[Any]:
    world = ParallelConfig(**layout).total_size
    return [function(*args)] if world == 1 else pools(world).run(function, *args)


# The plan


@pytest.mark.parametrize(
    ("shape", "cuts", "aligned"),
    [
        ((128, 128), (), True),
        ((50, 50), (), True),  # one process is what there is to be equal to
        ((128, 128), (Cut("tp", 0, 2),), True),
        ((128, 128), (Cut("tp", 1, 2),), True),
        ((128, 96), (Cut("tp", 1, 2),), False),  # 48 values
        ((128, 192), (Cut("tp", 1, 2),), False),  # 96 values
        ((100, 32), (Cut("tp", 0, 2),), True),  # 50 rows of half a block
        ((50, 32), (Cut("tp", 0, 2),), False),  # 25
        ((51, 64), (Cut("tp", 0, 2),), True),
        ((128, 64), (Cut("tp", 0, 2, parts=(64, 32, 32)), Cut("dp_shard", 0, 2)), True),
        (
            (6, 32),
            (Cut("tp", 0, 2, parts=(4, 2)),),
            False,
        ),  # the second part begins in the middle of a block
        ((128, 256), (Cut("tp", 1, 2), Cut("dp_shard", 0, 3)), True),
        ((4, 128, 128), (Cut("ep", 0, 2), Cut("tp", 2, 2)), True),
        ((4, 50, 50), (Cut("ep", 0, 2),), True),  # whole matrices
        ((4, 50, 50), (Cut("ep", 0, 2), Cut("edp_shard", 1, 2)), False),
    ],
)
def test_blocks_of_shards(shape: tuple[int, ...], cuts: tuple[Cut, ...], aligned: bool) -> None:
    assert matrix_blocks_align(shape, cuts) is aligned


def test_blocks_of_turned_weights_and_of_8_bits() -> None:
    assert matrix_blocks_align((128, 50), (Cut("tp", 0, 2),), transposed=True)
    assert not matrix_blocks_align((128, 50), (Cut("tp", 0, 4),), transposed=True)
    assert matrix_blocks_align((7, 5), (Cut("tp", 0, 2),), bits=8)
    assert not matrix_blocks_align((128, 128), (Cut("tp", 1, 2),), bits=8)


def test_plan_says_what_is_not_equal() -> None:
    layout = ParallelConfig(tp_size=2)
    table = str(hfscale.plan(wide("llama"), layout, quantization_config=four_bits()))
    assert "quantized: 14 weights in 4 bits (nf4)" in table
    assert "do not align" not in table
    table = str(hfscale.plan(wide("llama"), layout, quantization_config=four_bits(double=True)))
    assert "do not align" not in table
    assert (
        "double quantization takes blocks and a mean over the scales of a shard: close to unsharded, not"
        in table
    )
    table = str(
        hfscale.plan(
            wide("llama", intermediate_size=192), layout, quantization_config=four_bits("fp4")
        )
    )
    assert (
        "4-bit blocks of 2 weights do not align with their shards: close to unsharded, not equal"
        in table
    )
    table = str(
        hfscale.plan(
            wide("llama"), layout, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
        )
    )
    assert "8-bit rows of 4 weights do not align with their shards" in table
    skipping = four_bits(llm_int8_skip_modules=["lm_head", "gate_proj", "up_proj", "down_proj"])
    assert "quantized: 8 weights" in str(hfscale.plan(wide("llama"), quantization_config=skipping))


# Values


@pytest.mark.daily("nf4-tp2-shard2", "nf4-pp2-tp2", "nf4-sp2", "nf4-replicate2")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["nf4", pytest.param("fp4", marks=pytest.mark.slow)])
def test_values_are_those_of_one_process(
    pools: Pools, tmp_path: Path, kind: str, layout: str
) -> None:
    path = save(wide("llama"), tmp_path)
    for found in on_ranks(
        pools, LAYOUTS[layout], compare_weights, path, LAYOUTS[layout], four_bits(kind)
    ):
        assert len(found) == (7 if "pp" in layout else 14)
        for name, (planned, equal, _) in found.items():
            assert planned, name
            assert equal, name


@pytest.mark.daily("gpt2-tp2", "phi3-shard2")
@pytest.mark.parametrize("layout", ["tp2", "shard2", "tp2-shard2"])
@pytest.mark.parametrize("family", ["phi3", "gpt2", "qwen2"])
def test_fused_turned_and_biased_weights(
    pools: Pools, tmp_path: Path, family: str, layout: str
) -> None:
    path = save(wide(family), tmp_path)
    for found in on_ranks(
        pools, LAYOUTS[layout], compare_weights, path, LAYOUTS[layout], four_bits()
    ):
        assert len(found) == {"phi3": 8, "gpt2": 8, "qwen2": 14}[family]
        for name, (planned, equal, error) in found.items():
            assert equal or not planned, name
            assert error < 0.3, name


def test_copied_heads(pools: Pools, tmp_path: Path) -> None:
    path = save(wide("llama"), tmp_path)
    for found in pools(4).run(compare_weights, path, {"tp_size": 4}, four_bits()):
        assert all(planned and equal for planned, equal, _ in found.values())


@pytest.mark.daily("tp2-shard2")
@pytest.mark.parametrize("layout", ["tp2", "shard2", "tp2-shard2", "shard4"])
def test_blocks_that_do_not_align_are_close(pools: Pools, tmp_path: Path, layout: str) -> None:
    """Rows of 90 values, of which no multiple but 32 is whole blocks; shards of 23 rows and of 22."""
    changes = {"hidden_size": 72, "intermediate_size": 90, "num_attention_heads": 4}
    path = save(wide("llama", **changes), tmp_path)
    sizes = {**LAYOUTS, "shard4": {"dp_shard_size": 4}}[layout]
    for found in on_ranks(pools, sizes, compare_weights, path, sizes, four_bits()):
        assert not all(planned for planned, _, _ in found.values())
        for name, (planned, equal, error) in found.items():
            assert equal or not planned, name
            assert error < 0.3, name  # the widest step of nf4; misplaced values miss by 1


@pytest.mark.daily("tp2-shard2")
@pytest.mark.parametrize("layout", ["one", "tp2", "shard2", "tp2-shard2"])
def test_double_quantization_is_close(pools: Pools, tmp_path: Path, layout: str) -> None:
    path = save(wide("llama"), tmp_path)
    config = four_bits(double=True)
    for found in on_ranks(pools, LAYOUTS[layout], compare_weights, path, LAYOUTS[layout], config):
        for name, (_, equal, error) in found.items():
            assert error < 0.01, name  # of scales in 8 bits
            assert equal or layout != "one", name


# Modules


def kinds(path: str, layout: Layout) -> dict[str, Any]:
    """What adapters see of the modules of a layer."""
    model = load(path, layout, four_bits(bnb_4bit_compute_dtype=torch.bfloat16))
    layer = model.model.layers[0]
    assert all(type(parameter) is not nn.Linear for parameter in layer.modules())
    found: dict[str, Any] = {}
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        module = layer.get_submodule(name)
        assert isinstance(module, bnb.nn.Linear4bit)
        assert module.compute_dtype == torch.bfloat16
        assert module.weight.quant_type == "nf4"
        assert not module.weight.compress_statistics
        assert not module.weight.requires_grad
        assert not module.weight.is_floating_point()
        found[name] = type(module).__name__, module.in_features, module.out_features
    assert type(model.lm_head) is nn.Linear
    assert all(p.requires_grad for name, p in model.named_parameters() if "norm" in name)
    return found


def test_modules_are_the_stock_ones_with_local_sizes(pools: Pools, tmp_path: Path) -> None:
    path = save(wide("llama"), tmp_path)
    for found in pools(2).run(kinds, path, {"tp_size": 2}):
        assert found == {
            "self_attn.q_proj": ("Linear4bit", 256, 128),
            "self_attn.o_proj": ("Linear4bit", 128, 256),
            "mlp.down_proj": ("Linear4bit", 256, 256),
        }
    for found in pools(2).run(kinds, path, {"dp_shard_size": 2}):
        assert found["mlp.down_proj"] == ("ShardedLinear4bit", 512, 256)


def storage_and_skipped(path: str, layout: Layout) -> None:
    config = four_bits(
        bnb_4bit_quant_storage=torch.bfloat16, llm_int8_skip_modules=["lm_head", "q_proj"]
    )
    attention = load(path, layout, config).model.layers[1].self_attn
    assert type(attention.q_proj) is nn.Linear
    assert attention.q_proj.weight.shape == (128, 256)
    assert isinstance(attention.k_proj, bnb.nn.Linear4bit)
    assert attention.k_proj.weight.dtype == torch.bfloat16


def test_storage_type_and_skipped_modules(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(storage_and_skipped, save(wide("llama"), tmp_path), {"tp_size": 2})


# Refusals


def test_refusals(tmp_path: Path) -> None:
    path = save(wide("llama"), tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"from_config\(quantization_config=\.\.\.\) would quantize random weights",
    ):
        hfscale.from_config(wide("llama"), quantization_config=four_bits())
    with pytest.raises(
        ConfigError, match=r"load_in_8bit=True cannot be used with .*dp_shard2 in GPT2LMHeadModel"
    ):
        hfscale.plan(
            wide("gpt2"),
            ParallelConfig(dp_shard_size=2),
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        )
    with pytest.raises(ConfigError, match="is not one that hfscale can shard"):
        load(path, {}, {"load_in_4bit": True})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="add 'lm_head' to llm_int8_skip_modules"):
        load(path, {}, four_bits(llm_int8_skip_modules=["q_proj"]))
    quantized = stock(path, four_bits())
    with pytest.raises(PlanError, match=r"it is quantized \(bitsandbytes\) already"):
        hfscale.parallelize(quantized)
    with pytest.raises(ConfigError, match="merge adapters into 16 bits first"):
        hfscale.save_pretrained(load(path, {}, four_bits()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_evaluation_leaves_weights_trainable(tmp_path: Path) -> None:
    """Some processors have a layout of their own for evaluation, and bitsandbytes no way back to training from it."""
    model = load(
        save(tiny("llama", hidden_size=128, num_attention_heads=4), tmp_path), {}, four_bits()
    )
    before = through(model.train(), 128)
    with torch.no_grad():
        model.eval()(torch.tensor([[1, 2, 3]]))
    for module in leaves(model).values():
        assert module.weight.dtype == torch.uint8
    for one, other in zip(before, through(model.train(), 128), strict=True):
        assert torch.equal(one, other)
