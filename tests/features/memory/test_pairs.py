"""Pairs of levers over every axis: what does not change the arithmetic changes nothing beside what does."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from peft import LoraConfig
from torch import Tensor

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.testing import RankPool
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime.shards import local_tensor

from ...layouts import named
from ...mixtures import qwen3_moe
from ...sweeps import cases
from ...tiny_models import tiny
from ..quantization.models import four_bits, save, wide

Pools = Callable[[int], RankPool]
LAYOUTS = named("sequence", "1f1b", "zbv", "pipedream", "shard2", "replicate2", "ep2", "cp2")
KEEPS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "modules": {"recompute": ["self_attn", "post_attention_layernorm"]},
    "budget": {"recompute": "200KB"},
    "elementwise": {"recompute": "elementwise"},
    "activations": {"offload_activations": "64"},
    "parameters": {"offload_parameters": True},
    "optimizer": {"offload_optimizer": True},
}
CHANGES = ("bf16", "fp16", "fp8", "rounding", "compression", "lora", "4 bits", "compressed")


def fits(layout: str, *levers: str) -> bool:
    """Whether the table of docs/memory.md says so, and the levers are not one choice."""
    recomputing = [name for name in levers if "recompute" in KEEPS.get(name, {})]
    data = ParallelConfig(**LAYOUTS[layout]).data_world > 1
    return (
        len(recomputing) < 2
        and ("parameters" not in levers or data)
        and ("compression" not in levers or layout == "replicate2")
        and ("4 bits" not in levers or layout not in ("ep2", "pipedream"))
        and not {layout, *levers} >= {"cp2", "selective"}
        and not {layout, *levers} >= {"pipedream", "fp16"}
        and not (
            "compressed" in levers and recomputing
        )  # rounds what recomputed layers keep, which is something else
    )


PAIRS = [
    (layout, one, other)
    for layout in LAYOUTS
    for one, other in [
        *combinations(KEEPS, 2),
        *((keep, change) for keep in KEEPS for change in CHANGES),
    ]
    if fits(layout, one, other)
]
DAILY = [
    ("sequence", "full", "fp16"),
    ("sequence", "modules", "activations"),
    ("zbv", "selective", "bf16"),
    ("zbv", "activations", "optimizer"),
    ("pipedream", "full", "activations"),
    ("pipedream", "optimizer", "fp8"),
    ("shard2", "full", "fp8"),
    ("shard2", "parameters", "rounding"),
    ("replicate2", "activations", "compression"),
    ("ep2", "budget", "optimizer"),
    ("cp2", "modules", "lora"),
    ("shard2", "optimizer", "compressed"),
    ("1f1b", "activations", "4 bits"),
    ("sequence", "elementwise", "bf16"),
    ("pipedream", "elementwise", "activations"),
    ("shard2", "elementwise", "fp8"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a model of which shares are whole blocks of 4 bits."""
    return save(wide("llama", num_hidden_layers=4), tmp_path_factory.mktemp("base"))


def built(layout: dict[str, Any], change: str, base: str, **asked: Any) -> Any:
    """A model in training, with what ``change`` asks for."""
    torch.manual_seed(0)
    lora = (
        LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
        if change in ("lora", "4 bits")
        else None
    )
    asked |= {
        "parallel": ParallelConfig(**layout),
        "peft_config": lora,
        "attn_implementation": "eager",
    }
    if change == "4 bits":
        return hfscale.from_pretrained(base, quantization_config=four_bits(), **asked).train()
    return hfscale.from_config(
        qwen3_moe(num_hidden_layers=4)
        if "ep_size" in layout
        else tiny("llama", num_hidden_layers=4),
        mixed_precision=change if change in ("bf16", "fp16", "fp8") else "no",
        dtype=torch.bfloat16 if change == "rounding" else torch.float32,
        **asked,
    ).train()


def trained(layout: dict[str, Any], keeps: list[str], change: str, base: str) -> list[Tensor]:
    """Weights after two steps."""
    asked = {name: value for keep in keeps for name, value in KEEPS[keep].items()}
    if "ep_size" in layout and asked.get("recompute") == "200KB":
        asked["recompute"] = "300KB"
    if change == "4 bits" and asked.get("recompute") == "200KB":
        asked["recompute"] = "1MB"
    asked |= {"compress_activations": "64"} if change == "compressed" else {}
    compressed = {"gradient_compression": "powersgd"} if change == "compression" else {}
    model = built({**layout, **compressed}, change, base, memory=MemoryConfig(**asked))
    optimizer = hfscale.create_optimizer(
        model, "adamw_torch", lr=1e-3, stochastic_rounding=change == "rounding"
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        batches = [ragged_batch(generator, 67, 2, 12, False) for _ in range(4)]
        losses = [
            hfscale.train_step(
                model, batches[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
            )
        ]
        hfscale.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for _ in hfscale.drain(model):
        optimizer.step()
        optimizer.zero_grad()
    assert losses
    return [local_tensor(parameter.detach()).float() for parameter in model.parameters()]


@pytest.mark.daily("zbv-selective-bf16", "ep2-budget-optimizer")
@pytest.mark.parametrize(
    ("layout", "one", "other"),
    [pytest.param(*case, marks=() if case in DAILY else pytest.mark.slow) for case in PAIRS],
)
def test_levers_leave_each_other_alone(
    pools: Pools, base: str, layout: str, one: str, other: str
) -> None:
    sizes = dict(LAYOUTS[layout])
    # A block that is recomputed alone enters without overlap, and adds in another order.
    if "modules" in (
        one,
        other,
    ):
        sizes["overlap"] = False
    pool = pools(2)
    change = other if other in CHANGES else ""
    both = [one] if change else [one, other]
    alone, together = (pool.run(trained, sizes, keeps, change, base) for keeps in ([], both))
    # Products of experts' rows round by where the rows lie in memory, which is elsewhere after a copy (measured: 2e-7);
    # in 16 bits a rounding may turn an update of 1e-3 around.
    moved = "activations" in both and layout == "ep2"
    apart = 0.0 if not moved else 2e-3 if change in ("bf16", "fp16", "fp8", "rounding") else 1e-6
    for expected, found in zip(alone, together, strict=True):
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=apart)


def gradients(layout: dict[str, Any], change: str, compress: bool, base: str) -> list[Tensor]:
    """The loss of a step, and this rank's gradients."""
    asked: dict[str, Any] = {
        "memory": MemoryConfig(compress_activations="64") if compress else None
    }
    asked |= {"loss_scaling": GradScalerKwargs(init_scale=64.0)} if change == "fp16" else {}
    compressed = {"gradient_compression": "bf16"} if change == "compression" else {}
    model = built({**layout, **compressed}, change, base, **asked)
    generator = torch.Generator().manual_seed(1)
    batches = [
        ragged_batch(generator, 67, 2, 12, False) for _ in range(2 * hfscale.batch_world(model))
    ]
    loss = hfscale.train_step(
        model, batches[hfscale.batch_rank(model) :: hfscale.batch_world(model)]
    )
    return [loss, *(local_tensor(p.grad).float() for p in model.parameters() if p.grad is not None)]


BESIDE = [
    (layout, change)
    for layout in LAYOUTS
    for change in CHANGES
    if change != "compressed" and layout != "pipedream" and fits(layout, change)
]


@pytest.mark.daily("replicate2-compression")
@pytest.mark.parametrize(
    ("layout", "change"), cases(BESIDE, daily=[("sequence", "fp8"), ("replicate2", "compression")])
)
def test_compressed_activations_beside_what_changes(
    pools: Pools, base: str, layout: str, change: str
) -> None:
    """Losses are those without, and gradients near."""
    pool = pools(2)
    sizes = LAYOUTS[layout]
    apart = whole = 0.0
    for plain, found in zip(
        *(pool.run(gradients, sizes, change, compress, base) for compress in (False, True)),
        strict=True,
    ):
        assert torch.equal(plain[0], found[0])
        assert len(plain) == len(found) > 10 - 6 * (change in ("lora", "4 bits"))
        apart += sum(
            float((a - b).square().sum()) for a, b in zip(plain[1:], found[1:], strict=True)
        )
        whole += sum(float(a.square().sum()) for a in plain[1:])
    assert 0 < (apart / whole) ** 0.5 < (0.15 if change == "fp8" else 0.05)


def test_all_of_the_daily_ones_are_pairs() -> None:
    assert set(DAILY) <= set(PAIRS)
    assert len(PAIRS) > 250
