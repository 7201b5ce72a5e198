"""Where blocks gather their input again in the backward pass, adapters in front of it keep their rank's share alone."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.features.memory.saved import count_saved
from hfscale.parallel.tensor.edges import Overlap
from hfscale.testing import Case, RankPool, assert_layout_equal
from hfscale.train.runtime import local_tensor, runtime_of

from ...families import config_of
from ...sweeps import cases
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
AGAIN: dict[str, Any] = {"tp_size": 2, "sequence_parallel": True, "sequence_regather": True}
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"lora": {"lora_dropout": 0.3}},
    "dora": {"lora": {"use_dora": True, "lora_dropout": 0.3}},
    "bf16": {"dtype": torch.bfloat16, "lora": {"lora_dropout": 0.3}},
    "autocast": {"dtype": torch.float32, "mixed_precision": "bf16", "lora": {"lora_dropout": 0.3}},
    "recomputed": {"memory": {"recompute": "full"}, "lora": {"lora_dropout": 0.3}},
    "zbv": {"layout": {"pp_size": 2, "pipeline_schedule": "zbv"}, "lora": {"lora_dropout": 0.3}},
    "several": {
        "lora": {
            "target_modules": ["q_proj", "v_proj", "up_proj", "o_proj"],
            "rank_pattern": {"q_proj": 2},
        }
    },
    "gpt2": {"family": "gpt2", "lora": {"fan_in_fan_out": True, "lora_dropout": 0.3}},
    "loop": {"loop": True, "lora": {"lora_dropout": 0.3}},
}


def trained(asked: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of two steps, gradients and weights after them, and bytes that the layers keep, in ragged shares."""
    torch.manual_seed(0)
    options = {name: asked[name] for name in ("mixed_precision",) if name in asked}
    sizes = {"num_hidden_layers": 4} if "layout" in asked else {}
    layout = {**AGAIN, **asked.get("layout", {})} | ({"num_microbatches": 2} if sizes else {})
    model = hfscale.from_config(
        tiny(asked.get("family", "llama"), **sizes),
        parallel=ParallelConfig(**layout),
        dtype=asked.get("dtype", torch.float64),
        peft_config=LoraConfig(**{**LORA, **asked.get("lora", {})}),
        memory=MemoryConfig(**asked.get("memory", {})),
        **options,
    ).train()
    runtime = runtime_of(model)
    losses = []
    generator = torch.Generator().manual_seed(0)
    for planned, parameter in runtime.parameters():  # second factors begin at zero
        if "lora_B" in planned.name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(3, 60, (4, 11), generator=generator)
    with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
        for _ in range(2):
            optimizer.zero_grad()
            if "loop" in asked:
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            else:
                loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
            losses.append(float(loss.detach()))
            optimizer.step()
    held = {planned.name: parameter for planned, parameter in runtime.parameters()}
    found = {
        f"{name}.grad": local_tensor(p.grad).clone()
        for name, p in held.items()
        if p.grad is not None
    }
    assert any(found[name].abs().max() > 0 for name in found if "lora_A" in name)
    return (
        losses,
        found | {name: p.detach().clone() for name, p in held.items() if p.requires_grad},
        saved.layers,
    )


def both(asked: dict[str, Any]) -> tuple[Any, Any]:
    """With inputs of adapters gathered again, and kept."""
    again = trained(asked)
    with patch.object(Overlap, "read_by", lambda *_: None):
        return again, trained(asked)


@pytest.mark.daily("dropout", "bf16")
@pytest.mark.parametrize("case", cases(CASES, daily=["plain", "dropout", "bf16"]))
def test_gathering_again_changes_no_bit(pools: Pools, case: str) -> None:
    asked = CASES[case]
    for (losses, found, kept), (expected, wanted, whole) in pools(
        4 if "layout" in asked else 2
    ).run(both, asked):
        assert losses == expected
        assert found.keys() == wanted.keys()
        assert not [name for name, value in found.items() if not torch.equal(value, wanted[name])]
        assert kept < whole or "memory" in asked


@pytest.mark.parametrize(
    ("layout", "changes"),
    cases(
        [
            ("tp2", {}),
            ("tp2", {"use_dora": True}),
            ("tp2", {"target_modules": ["k_proj", "gate_proj"]}),
            ("tp2-pp2", {}),
            ("tp4", {}),
        ],
        daily=[("tp2", {})],
    ),
)
@pytest.mark.parametrize("recomputes", cases([False, True], daily=[False]))
def test_equals_one_process(
    pools: Pools, layout: str, changes: dict[str, Any], recomputes: bool
) -> None:
    sizes = {"tp2": {}, "tp2-pp2": {"pp_size": 2, "num_microbatches": 2}, "tp4": {"tp_size": 4}}[
        layout
    ]
    parallel = ParallelConfig(**{**AGAIN, **sizes})
    case = Case(tiny("llama"), peft=LoraConfig(**{**LORA, **changes}), checkpointing=recomputes)
    assert_layout_equal(case, parallel, pools(parallel.total_size))


# An MLP whose projections are children of its layer makes the layer a block around its attention.
IN_THE_LAYER = ["opt", "bert", "xglm"]


@pytest.mark.parametrize("family", cases(IN_THE_LAYER, daily=["opt", "bert"]))
@pytest.mark.parametrize("changes", cases([{}, {"bias": "all"}], daily=[{}]))
@pytest.mark.parametrize("recomputes", cases([False, True], daily=[False]))
def test_blocks_around_blocks_equal_one_process(
    pools: Pools, family: str, changes: dict[str, Any], recomputes: bool
) -> None:
    case = Case(
        config_of(family), steps=3, peft=LoraConfig(**{**LORA, **changes}), checkpointing=recomputes
    )
    assert_layout_equal(case, ParallelConfig(**AGAIN), pools(2))


def losses_and_gradients(
    family: str, layout: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    """Of three steps of a plain loop."""
    model = hfscale.from_config(
        config_of(family),
        parallel=ParallelConfig(**layout),
        dtype=torch.float64,
        seed=0,
        peft_config=LoraConfig(**LORA, init_lora_weights=False),
    ).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
    losses = []
    plan = runtime_of(model).plan
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    cut = {planned.name for planned in plan.parameters if planned.cuts}
    named = runtime_of(model).parameters()
    return losses, {
        p.name: leaf.grad for p, leaf in named if leaf.grad is not None and p.name not in cut
    }


def test_blocks_around_blocks_in_a_plain_loop(pools: Pools) -> None:
    losses, gradients = losses_and_gradients("opt", {})
    for found, whole in pools(2).run(losses_and_gradients, "opt", AGAIN):
        assert found == pytest.approx(losses, rel=1e-10)
        assert whole
        for name, gradient in whole.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-8, atol=1e-12)
