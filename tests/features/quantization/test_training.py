"""Training over a base in 4 bits: passes and gradients are those of one process; memory is that of the shards."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.distributed.files.reader import SafetensorsFile
from hfscale.distributed.ops.quantized_weights import encodings_of
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...tensor_memory import follow_memory
from .models import Layout, four_bits, load, save, stock, through, tokens, wide

Pools = Callable[[int], RankPool]

SHARD2: Layout = {"dp_shard_size": 2}


def on_ranks(pools: Pools, layout: Layout, function: Callable[..., Any], *args: Any) -> list[Any]:
    world = ParallelConfig(**layout).total_size
    return [function(*args)] if world == 1 else pools(world).run(function, *args)


# One pass, bit by bit


def pass_of(
    path: str,
    layout: Layout,
    config: BitsAndBytesConfig,
    times: int,
    checkpointing: bool,
    mixed: str,
) -> Any:
    model = load(path, layout, config, mixed_precision=mixed).train()
    if checkpointing:
        enable_checkpointing(model)
    for _ in range(times):  # weights are gathered and given up anew each time
        found = through(model, 256, torch.float32 if mixed == "no" else torch.bfloat16)
    for module in model.modules():
        for name in encodings_of(module):
            assert isinstance(module._parameters[name], DTensor)
    return found


@pytest.mark.daily("nf4-replicate2-True", "nf4-shard2-False")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "layout", [{}, SHARD2, {"dp_replicate_size": 2}], ids=["one", "shard2", "replicate2"]
)
@pytest.mark.parametrize("kind", ["nf4", pytest.param("fp4", marks=pytest.mark.slow)])
def test_wrapping_changes_no_bit(
    pools: Pools, tmp_path: Path, kind: str, layout: Layout, checkpointing: bool
) -> None:
    path = save(wide("llama", attention_bias=True), tmp_path)
    expected = through(stock(path, four_bits(kind)).train(), 256)
    for found in on_ranks(
        pools, layout, pass_of, path, layout, four_bits(kind), 2, checkpointing, "no"
    ):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.daily("computes0")
@pytest.mark.parametrize("computes", [torch.float32, torch.bfloat16])
def test_mixed_precision_leaves_packed_bytes_alone(
    pools: Pools, tmp_path: Path, computes: torch.dtype
) -> None:
    path = save(wide("llama"), tmp_path)
    config = four_bits(bnb_4bit_compute_dtype=computes)
    reference = stock(path, config).train()
    for parameter in reference.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    expected = through(reference, 256, torch.bfloat16)
    for found in pools(2).run(pass_of, path, SHARD2, config, 2, False, "bf16"):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_weights_in_16_bits(pools: Pools, tmp_path: Path) -> None:
    """What is dequantized for gradients goes through the type that was quantized."""
    path = save(wide("llama"), tmp_path, torch.bfloat16)
    expected = through(stock(path, four_bits(), torch.bfloat16).train(), 256, torch.bfloat16)
    for found in pools(2).run(pass_of_16, path):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def pass_of_16(path: str) -> tuple[Tensor, Tensor]:
    return through(
        load(path, SHARD2, four_bits(), dtype=torch.bfloat16).train(), 256, torch.bfloat16
    )


def test_double_quantization_is_close(pools: Pools, tmp_path: Path) -> None:
    path = save(wide("llama"), tmp_path)
    expected = through(stock(path, four_bits(double=True)).train(), 256)
    for found in pools(2).run(pass_of, path, SHARD2, four_bits(double=True), 2, False, "no"):
        for one, other in zip(found, expected, strict=True):
            assert not torch.equal(one, other)
            assert (one - other).norm() < 0.02 * other.norm()


# A step


def step_of(
    path: str, layout: Layout, config: BitsAndBytesConfig
) -> tuple[float, float, dict[str, Any]]:
    """Loss, norm, and gradients of this rank with where they belong."""
    model = load(path, layout, config).train()
    mine = hfscale.batch_rank(model)
    world = hfscale.batch_world(model)
    ids = tokens(4)[mine::world]
    loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    runtime = runtime_of(model)
    found = {
        planned.name: (local_tensor(parameter.grad).clone(), runtime.mesh.ranks)
        for planned, parameter in runtime.parameters()
        if parameter.grad is not None
    }
    return float(loss), float(hfscale.clip_grad_norm_(model, 1.0)), found


@pytest.mark.daily("llama-pp2-nu2-pizbv", "gpt2-tp2-dp2", "phi3-tp2")
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"tp_size": 2}),
        ("llama", {"tp_size": 2, "sequence_parallel": True}),
        ("llama", {"pp_size": 2, "num_microbatches": 2}),
        ("llama", {"pp_size": 2, "num_microbatches": 2, "pipeline_schedule": "zbv"}),
        ("llama", {"tp_size": 2, "dp_shard_size": 2}),
        ("llama", {"pp_size": 2, "dp_shard_size": 2, "num_microbatches": 2}),
        ("llama", {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}),
        ("llama", {"tp_size": 4}),
        ("phi3", {"tp_size": 2}),
        ("gpt2", {"tp_size": 2}),
        ("gpt2", {"dp_shard_size": 2}),
        ("gpt2", {"tp_size": 2, "dp_shard_size": 2}),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(f"{k[:2]}{v}" for k, v in value.items())
    ),
)
def test_a_step_is_that_of_one_process(
    pools: Pools, tmp_path: Path, family: str, layout: Layout
) -> None:
    """Row biases are added once; what trains here (norms, embeddings) has its gradient through the frozen weights."""
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    layers = {"num_hidden_layers": 4} if layout.get("pipeline_schedule") else {}
    config = wide(family, **biases, **layers)
    path = save(config, tmp_path)
    reference = stock(path, four_bits()).train()
    loss = reference(input_ids=tokens(4), labels=tokens(4)).loss
    loss.backward()
    grads = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads.values()])).item()
    plan = hfscale.plan(config, ParallelConfig(**layout))
    seen: set[str] = set()
    for found in on_ranks(pools, layout, step_of, path, layout, four_bits()):
        assert found[0] == pytest.approx(loss.item(), rel=1e-5)
        assert found[1] == pytest.approx(norm, rel=1e-4)
        for name, (grad, ranks) in found[2].items():
            expected = plan.by_name[name].take(grads[name], ranks)
            assert (grad - expected).norm() <= 1e-4 * grads[name].norm() + 1e-9, name
            seen.add(name)
    assert seen == grads.keys()


def test_eight_bits(pools: Pools, tmp_path: Path) -> None:
    """Rows of 8-bit weights have a scale each: columns are equal, rows close."""
    config = BitsAndBytesConfig(load_in_8bit=True)
    path = save(wide("llama"), tmp_path)
    reference = stock(path, config).train()
    expected = reference(input_ids=tokens(4), labels=tokens(4)).loss.item()
    layouts: list[Layout] = [
        {},
        SHARD2,
        {"dp_replicate_size": 2},
        {"tp_size": 2},
        {"tp_size": 2, "dp_shard_size": 2},
    ]
    for layout in (*layouts, {"pp_size": 2, "num_microbatches": 2}):
        for loss, _, grads in on_ranks(pools, layout, step_of, path, layout, config):
            assert loss == pytest.approx(expected, rel=1e-3 if "tp_size" in layout else 1e-5)
            assert grads


@pytest.mark.daily("bf16")
@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_sharding_rows_changes_no_bit(pools: Pools, tmp_path: Path, mixed: str) -> None:
    config = BitsAndBytesConfig(load_in_8bit=True)
    path = save(wide("llama", attention_bias=True, intermediate_size=511), tmp_path)
    reference = stock(path, config).train()
    dtype = torch.bfloat16 if mixed == "bf16" else torch.float32
    for parameter in reference.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    expected = through(reference, 256, dtype)
    for found in pools(2).run(pass_of, path, SHARD2, config, 2, False, mixed):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


# Memory


def loaded(path: str, layout: Layout, config: BitsAndBytesConfig) -> dict[str, int]:
    """Bytes: read, at most alive, left alive, and those of this rank's parameters that are not quantized."""
    total = 0
    original = SafetensorsFile.read

    def read(self: SafetensorsFile, offset: int, buffer: Tensor) -> None:
        nonlocal total
        total += buffer.numel() * buffer.element_size()
        original(self, offset, buffer)

    SafetensorsFile.read = read  # type: ignore[method-assign]
    gc.collect()
    try:
        with follow_memory() as memory:
            model = load(path, layout, config, dtype=torch.bfloat16)
            gc.collect()
    finally:
        SafetensorsFile.read = original  # type: ignore[method-assign]
    held = [local_tensor(p.detach()) for p in model.parameters()]
    planned = runtime_of(model).plan
    shares = [
        p.local_shape(runtime_of(model).mesh.ranks)
        for p in planned.owned()
        if runtime_of(model).is_local(p.name)
    ]
    sizes = [2 * torch.Size(shape).numel() for shape in shares]
    return {
        "read": total,
        "peak": memory.peak,
        "live": memory.live,
        "share": sum(sizes),
        "largest": max(sizes),
        "plain": sum(t.numel() * t.element_size() for t in held if t.is_floating_point()),
        "packed": sum(t.numel() * t.element_size() for t in held if not t.is_floating_point()),
    }


@pytest.mark.daily("tp2")
@pytest.mark.parametrize(
    "layout", [{}, {"tp_size": 2}, {"pp_size": 2}, SHARD2], ids=["one", "tp2", "pp2", "shard2"]
)
def test_no_rank_holds_its_share_in_16_bits(pools: Pools, tmp_path: Path, layout: Layout) -> None:
    """At most two copies of one tensor (read, and laid out anew) over what is left: packed weights and their scales."""
    path = save(wide("llama", num_hidden_layers=8, vocab_size=68), tmp_path, torch.bfloat16)
    for rank in on_ranks(pools, layout, loaded, path, layout, four_bits()):
        quantized = rank["share"] - rank["plain"]  # in 16 bits
        # Of a weight that is cut along its rows, the bytes between the pieces are read too: o_proj and down_proj.
        between = 8 * (256 * 128 + 256 * 256) * 2 if "tp_size" in layout else 0
        assert rank["read"] == rank["share"] + between
        # 4 bits, and a float32 for 64 values; beside parameters where the class is bitsandbytes'
        scales = 0 if "dp_shard_size" in layout else quantized // 2 // 64 * 4
        assert rank["packed"] + scales == quantized // 4 + quantized // 32
        slack = 16384  # tables of values, rotary tables
        assert rank["live"] <= rank["plain"] + quantized // 4 + quantized // 32 + slack
        assert rank["peak"] <= rank["live"] + 2 * rank["largest"] + slack
        assert rank["peak"] < rank["share"] * 0.6
