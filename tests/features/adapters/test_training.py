"""Adapters in the loops of users: plain ones, recomputed layers, dropout, 16-bit weights, resumed runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ParallelConfig
from hfscale._compat.transformers.computing import enable_checkpointing
from hfscale.testing import Case, RankPool, assert_layout_equal, plain
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ...mixtures import EAGER, qwen3_moe
from ...parity.test_plain import case as plain_case
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "sequence_parallel": True},
    "tp4": {"tp_size": 4},
    "tp2-shard2": {"tp_size": 2, "dp_shard_size": 2},
    "replicate2": {"dp_replicate_size": 2},
}
IDS = torch.randint(0, 67, (2, 12), generator=torch.Generator().manual_seed(4))


def _lora(**changes: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}
    )


def _check(pools: Pools, case: Case, layout: str) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    assert_layout_equal(case, parallel, pools(parallel.total_size))


@pytest.mark.daily("tp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plain_loop(pools: Pools, layout: str) -> None:
    """Gradients of factors that ranks share are summed in the backward pass."""
    _check(pools, plain.PlainCase(tiny("llama"), peft=_lora(use_dora=True)), layout)


def test_a_plain_loop_over_experts(pools: Pools) -> None:
    config = _lora(
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        target_modules=["q_proj"],
    )
    _check(pools, plain.PlainCase(qwen3_moe(), peft=config, hf_kwargs=EAGER), "tp2")


@pytest.mark.daily("classes of texts-tp2")
@pytest.mark.parametrize("layout", ["tp2", "sp2"])
@pytest.mark.parametrize(
    "kind",
    ["classes of texts", "attention to an encoder", "one layer many times", "relative biases"],
)
def test_other_classes(pools: Pools, kind: str, layout: str) -> None:
    """Edges on projections themselves sit outside of what PEFT wraps around these."""
    if (kind, layout) == ("one layer many times", "sp2"):
        pytest.skip("the plan refuses it")
    case = plain_case(kind)
    case.peft = LoraConfig(
        r=3, target_modules="all-linear", task_type="SEQ_CLS" if "classes" in kind else None
    )
    _check(pools, case, layout)


@pytest.mark.daily("sp2")
@pytest.mark.parametrize("layout", ["tp2", "sp2", "tp2-shard2"])
def test_recomputed_layers(pools: Pools, layout: str) -> None:
    """With a frozen embedding nothing that enters the first layer has a gradient."""
    _check(pools, Case(tiny("llama"), peft=_lora(), checkpointing=True), layout)


def _masks(path: str, sizes: dict[str, Any], seed: int) -> tuple[float, dict[str, Tensor]]:
    """Loss of a step with dropout, and the masks, by the module that drew them."""
    model = hfscale.from_pretrained(
        path, parallel=ParallelConfig(**sizes), peft_config=_lora(lora_dropout=0.5)
    )
    model.train()
    masks: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and "lora_dropout" in name:
            module.register_forward_hook(
                lambda _, args, out, name=name: masks.update({name: (out == 0).clone()})
            )
    torch.manual_seed(seed)
    loss = hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
    return loss.item(), masks


@pytest.mark.daily("0.3-tp2", "0.3-sp2")
@pytest.mark.parametrize("sizes", [LAYOUTS["tp2"], LAYOUTS["sp2"]], ids=["tp2", "sp2"])
@pytest.mark.parametrize("attention_dropout", [0.0, 0.3])
def test_dropout_in_front_of_adapters(
    pools: Pools, tmp_path: Path, sizes: dict[str, Any], attention_dropout: float
) -> None:
    """Whole inputs lose the same entries on all ranks, inputs that are spread over them different ones (T16)."""
    torch.manual_seed(0)
    config = tiny("llama", attention_dropout=attention_dropout)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (_, first), (_, second) = pools(2).run(_masks, str(tmp_path), sizes, 7)
    assert first.keys() == second.keys()
    for name, mask in first.items():
        assert 0.2 < mask.float().mean() < 0.8
        spread = "o_proj" in name or "down_proj" in name
        assert torch.equal(mask, second[name]) != spread, name


def _resumed(start: str, state: str, sizes: dict[str, Any]) -> bool:
    def build() -> tuple[Any, Any]:
        model = hfscale.from_pretrained(
            start, parallel=ParallelConfig(**sizes), peft_config=_lora(lora_dropout=0.2)
        )
        return model.train(), torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2
        )

    def steps(model: Any, optimizer: Any, count: int) -> None:
        for _ in range(count):
            hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(5)
    model, optimizer = build()
    steps(model, optimizer, 2)
    hfscale.save_state(model, state, optimizer=optimizer)
    steps(model, optimizer, 2)
    again, other = build()
    hfscale.load_state(again, state, optimizer=other)
    steps(again, other, 2)
    pairs = zip(runtime_of(model).parameters(), runtime_of(again).parameters(), strict=True)
    return all(
        torch.equal(local_tensor(a.detach()), local_tensor(b.detach())) for (_, a), (_, b) in pairs
    )


@pytest.mark.daily("tp2")
@pytest.mark.parametrize("layout", ["tp2", "tp2-shard2"])
def test_a_resumed_run(pools: Pools, tmp_path: Path, layout: str) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "start")
    size = ParallelConfig(**LAYOUTS[layout]).total_size
    assert all(
        pools(size).run(_resumed, str(tmp_path / "start"), str(tmp_path / "state"), LAYOUTS[layout])
    )


def _sixteen_bits(start: str, sizes: dict[str, Any], checkpointing: bool) -> dict[str, Any]:
    """Types, and what a few small steps change, of adapters around 16-bit weights."""
    model = hfscale.from_pretrained(
        start, parallel=ParallelConfig(**sizes), dtype="bfloat16", peft_config=_lora()
    )
    if checkpointing:
        enable_checkpointing(model)
    model.train()
    parameters = runtime_of(model).parameters()
    before = {planned.name: local_tensor(p.detach()).clone() for planned, p in parameters}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(3):
        hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
        missing = [planned.name for planned, p in parameters if p.requires_grad and p.grad is None]
        assert not missing, f"without a gradient: {missing}"
        optimizer.step()
        optimizer.zero_grad()
    moved = {
        n.name for n, p in parameters if not torch.equal(local_tensor(p.detach()), before[n.name])
    }
    factors = {planned.name for planned, p in parameters if p.requires_grad}
    return {
        "moved": moved,
        "factors": factors,
        "types": {p.dtype for _, p in parameters if p.requires_grad},
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2-shard2", "replicate2"])
def test_sixteen_bit_weights(pools: Pools, tmp_path: Path, layout: str) -> None:
    """Factors are kept in 32 bits and every one of them moves, nothing else does (T14, T15, T27)."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama", num_key_value_heads=4)).save_pretrained(tmp_path)
    size = ParallelConfig(**LAYOUTS[layout]).total_size
    for found in pools(size).run(_sixteen_bits, str(tmp_path), LAYOUTS[layout], True):
        assert found["types"] == {torch.float32}
        assert found["moved"] == found["factors"] != set()


def _after_steps(start: str, sizes: dict[str, Any]) -> dict[str, Tensor]:
    """Factors that every tensor rank holds whole, after some steps of AdamW."""
    model = hfscale.from_pretrained(
        start, parallel=ParallelConfig(**sizes), peft_config=_lora(use_dora=True)
    ).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(4):
        hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
        optimizer.step()
        optimizer.zero_grad()
    held = runtime_of(model).parameters()
    return {
        p.name: value.detach().clone() for p, value in held if p.partial and value.requires_grad
    }


@pytest.mark.daily("sp2")
@pytest.mark.parametrize("layout", ["tp2", "sp2", "tp4"])
def test_copies_of_factors_stay_equal_to_the_last_bit(
    pools: Pools, tmp_path: Path, layout: str
) -> None:
    """T6."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path)
    first, *others = pools(ParallelConfig(**LAYOUTS[layout]).total_size).run(
        _after_steps, str(tmp_path), LAYOUTS[layout]
    )
    assert first
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())
