"""Weights of products in 8 bits are gathered in 8 bits, and not a bit of what is computed changes by it."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import hfscale
from hfscale import ConfigError, Float8Config, MemoryConfig, ParallelConfig
from hfscale.features.fp8.gathered_weight import Float8Weight
from hfscale.features.fp8.scaled_matmul import Float8Products
from hfscale.testing import RankPool, Traffic, count_traffic
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...sweeps import cases
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
MICROBATCHES = 3
LAYERS = 2


def run(
    layout: dict[str, Any], precision: str = "fp8", float8: Float8Config | None = None, **asked: Any
) -> tuple[Traffic, list[Tensor], dict[str, int]]:
    """Traffic of a second step, weights after it, and entries of what this rank multiplies in 8 bits, and of the rest
    of a layer, and of what is around the layers.
    """
    torch.manual_seed(0)
    config = tiny(
        "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, vocab_size=68
    )
    parallel = ParallelConfig(**layout)
    model = hfscale.from_config(
        config,
        parallel=parallel,
        mixed_precision=precision,
        float8=float8,
        dtype=torch.float32,
        **asked,
    )
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        batches = [ragged_batch(generator, 67, 2, 12, False) for _ in range(MICROBATCHES * 4)]
        own = batches[hfscale.batch_rank(model) :: hfscale.batch_world(model)][:MICROBATCHES]
        with count_traffic() as traffic:
            hfscale.train_step(model, own)
        hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sizes = {"matrices": 0, "norms": 0, "around": 0}
    for planned, parameter in runtime_of(model).parameters():
        kind = (
            "around"
            if ".layers." not in planned.name
            else "matrices"
            if parameter.ndim > 1
            else "norms"
        )
        sizes[kind] += local_tensor(parameter).numel()
    return traffic, [local_tensor(p.detach()).clone() for p in model.parameters()], sizes


PLAIN = Float8Config(fp8_all_gather=False)
SHARDED: dict[str, dict[str, Any]] = {
    "shard2": {"dp_shard_size": 2},
    "cp2": {"cp_size": 2},
    "shard2, tp2": {"dp_shard_size": 2, "tp_size": 2, "sequence_parallel": True},
    "shard2, replicate2": {"dp_shard_size": 2, "dp_replicate_size": 2},
    "shard2, pp2": {"dp_shard_size": 2, "pp_size": 2},
    "shard3": {"dp_shard_size": 3},  # 64 and 32 rows over three ranks
}
WITH: dict[str, dict[str, Any]] = {
    "": {},
    "recomputed": {"memory": MemoryConfig(recompute="full")},
    "on the host": {"memory": MemoryConfig(offload_parameters=True, offload_activations="64")},
    "compressed": {"memory": MemoryConfig(compress_activations="64")},
    "lora": {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")},
    "dora": {
        "peft_config": LoraConfig(
            r=2, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM"
        )
    },
}


@pytest.mark.daily("shard2-on the host")
@pytest.mark.parametrize(
    ("layout", "besides"),
    cases(
        [*((layout, "") for layout in SHARDED), *(("shard2", name) for name in WITH if name)],
        daily=[("shard2", ""), ("shard2", "on the host")],
    ),
)
def test_weights_are_those_without_bit_by_bit(pools: Pools, layout: str, besides: str) -> None:
    sizes = SHARDED[layout]
    pool = pools(ParallelConfig(**sizes).total_size)
    eight = pool.run(run, sizes, **WITH[besides])
    sixteen = pool.run(run, sizes, float8=PLAIN, **WITH[besides])
    for (sent, found, held), (before, expected, _) in zip(eight, sixteen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        gathered = sent.payload["allgather"]
        whole = before.payload["allgather"]
        if besides == "dora":
            assert gathered == whole
        elif not besides and layout == "shard2":
            # Layers are gathered in both passes of every microbatch, what is around them in one; the rest is numbers
            # by which ranks agree.
            entries = MICROBATCHES * (2 * held["norms"] + held["around"])
            numbers = whole - 2 * (2 * MICROBATCHES * held["matrices"] + entries)
            assert 0 <= numbers < 200
            assert gathered == 2 * MICROBATCHES * held["matrices"] + 2 * entries + numbers
            assert whole - gathered == 2 * MICROBATCHES * held["matrices"]
        else:
            assert gathered < whole


ROWS = Float8Config("rowwise")
SEQUENCE = {"tp_size": 2, "sequence_parallel": True}
# Of a layer: inputs of two row projections, and the gradients at the entries of two blocks, of outputs of five column
# projections. A base is frozen: the first layer's input has no gradient. What is recomputed is asked for again.
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "shard2": ({"dp_shard_size": 2}, {}, 0),
    "tp2": ({"tp_size": 2}, {}, 4 * LAYERS),
    "tp2, by rows": ({"tp_size": 2}, {"float8": ROWS}, 4 * LAYERS),
    "sequence": (SEQUENCE, {}, 4 * LAYERS),
    "regather": ({**SEQUENCE, "sequence_regather": True}, {}, 4 * LAYERS),
    "lora": ({"tp_size": 2}, WITH["lora"], 4 * LAYERS - 1),
    "recomputed": ({"tp_size": 2}, WITH["recomputed"], 6 * LAYERS),
    # inputs of four kinds, and the gradients of seven outputs: context ranks have no entry
    "cp2": ({"cp_size": 2}, {}, 11 * LAYERS),
}


@pytest.mark.daily("shard2", "tp2")
@pytest.mark.parametrize("case", cases(ASKED, daily=["shard2", "tp2", "tp2, by rows", "lora"]))
def test_scales_are_asked_for_once_for_all_that_are_known(pools: Pools, case: str) -> None:
    """Those of all weights once a step, those at a block's entry together: with the bits of one question for each."""
    layout, asked, questions = ASKED[case]
    wide = {name: value for name, value in asked.items() if name != "float8"}
    runs = (pools(2).run(run, layout, **asked), pools(2).run(run, layout, precision="bf16", **wide))
    for (fp8, found, _), (bf16, *_), (each, expected, _) in zip(
        *runs, pools(2).run(alone, layout, **asked), strict=True
    ):
        assert fp8.calls["allreduce"] - bf16.calls["allreduce"] == 1 + questions * MICROBATCHES
        saved = ("tp_size" in layout) * 3 * LAYERS - 2 * (case == "lora")
        assert each.calls["allreduce"] - fp8.calls["allreduce"] == saved * MICROBATCHES
        # Whose factors read the input too: their gradients are added in another order.
        if case != "lora":
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def alone(*args: Any, **kwargs: Any) -> tuple[Traffic, list[Tensor], dict[str, int]]:
    """As :func:`run`, where each projection asks for the scale of its own gradient."""
    with patch.object(Float8Products, "agrees", False):
        return run(*args, **kwargs)


def test_a_plain_loop_finds_them_as_it_gathers(pools: Pools) -> None:
    for here in pools(2).run(plain_loop):
        assert here


def plain_loop() -> bool:
    """Whether a loop without ``train_step`` gives, bit by bit, the gradients without."""
    found = []
    for float8 in (None, PLAIN):
        torch.manual_seed(0)
        parallel = ParallelConfig(dp_shard_size=2)
        model = hfscale.from_config(
            tiny("llama"), parallel=parallel, mixed_precision="fp8", float8=float8
        )
        ids = torch.arange(24).view(2, 12)
        model(input_ids=ids, labels=ids).loss.backward()
        found.append([local_tensor(parameter.grad) for parameter in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_gathered_in_8_bits_is_for_products_only() -> None:
    entries = torch.ones(32, 16).to(torch.float8_e4m3fn)
    scale = torch.tensor(2.0)
    weight = torch.nn.Parameter(Float8Weight(entries, scale, torch.bfloat16))
    assert (weight.dtype, weight.shape, weight.t().shape) == (torch.bfloat16, (32, 16), (16, 32))
    assert weight.view_as(weight).scale is scale
    assert torch.zeros_like(weight).sum() == 0
    with pytest.raises(
        ConfigError, match=r"use float8=hfscale.Float8Config\(fp8_all_gather=False\)"
    ):
        weight.norm()


def test_which_are_is_in_the_plan() -> None:
    def planned(float8: Float8Config | None = None, shards: int = 2) -> str:
        layout = ParallelConfig(dp_shard_size=shards)
        return str(
            hfscale.plan(
                tiny("llama", hidden_size=64), layout, mixed_precision="fp8", float8=float8
            )
        )

    line = "data ranks gather their weights in 8 bits"
    assert line in planned()
    assert line not in planned(shards=1) + planned(PLAIN) + planned(Float8Config("rowwise"))
    with pytest.raises(ConfigError, match="no smaller than one copy in 16 bits: use 'tensorwise'"):
        Float8Config("rowwise", fp8_all_gather=True)
    with pytest.raises(ConfigError, match="fp8_all_gather='yes' is not a switch"):
        Float8Config(fp8_all_gather="yes")  # type: ignore[arg-type]
