"""Under ``"bf16_params"`` hidden states are in 16 bits over float32 weights, in every layout as in one process."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import hfscale
from hfscale import ConfigError, MemoryConfig, ParallelConfig, PlanError
from hfscale.config.options import MIXED_PRECISIONS
from hfscale.features.memory.saved import count_saved
from hfscale.models.precision import keep_float64
from hfscale.testing import RankPool
from hfscale.testing.parity import ragged_batch
from hfscale.train.runtime import Runtime, local_tensor, runtime_of
from hfscale.train.runtime.full_tensors import full_tensors, tensors_to_save

from ...families import config_of
from ...layouts import named
from ...mixtures import EAGER, qwen3_moe
from ...sweeps import cases
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]
CAST: dict[str, Any] = {"mixed_precision": "bf16_params", "dtype": torch.float32}
LAYOUTS = {
    **named(
        "one",
        "tp2",
        "sequence",
        "regather",
        "1f1b",
        "zbv",
        "shard2",
        "replicate2",
        "ep2",
        "ep2, tp2",
        "cp2",
    ),
    "pp2, tp2": {"pp_size": 2, "tp_size": 2, "sequence_parallel": True},
    "shard2, tp2": {"dp_shard_size": 2, "tp_size": 2},
}
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"sizes": {"tie_word_embeddings": True}},
    "frozen": {"frozen": "layers.1."},
    "lora": {"lora": LORA},
    "lora of experts": {
        "lora": {**LORA, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    },
    "full": {"memory": {"recompute": "full"}},
    "blocks": {"memory": {"recompute": ["self_attn", "post_attention_layernorm"]}},
    "elementwise": {"memory": {"recompute": "elementwise"}},
    "offloaded": {"memory": {"offload_activations": "64"}},
    "gpt2": {"family": "gpt2"},
    "kept in 32 bits": {"family": "ernie4_5_moe"},
}


def built(layout: dict[str, Any], asked: dict[str, Any], **more: Any) -> Any:
    """A model in training."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, **asked.get("sizes", {})}
    family = asked.get("family", "llama")
    if "ep_size" in layout:
        config = qwen3_moe(num_hidden_layers=4)
    else:
        config = config_of(family, layers=4) if family == "ernie4_5_moe" else tiny(family, **sizes)
    model = hfscale.from_config(
        config,
        parallel=ParallelConfig(**layout),
        peft_config=LoraConfig(**asked["lora"]) if "lora" in asked else None,
        memory=MemoryConfig(**asked.get("memory", {})),
        **{**CAST, **EAGER, **more},
    ).train()
    for name, parameter in model.named_parameters():
        if asked.get("frozen", "nothing") in name:
            parameter.requires_grad_(False)
    return model


def whole(runtime: Any) -> dict[str, Tensor]:
    """Full parameters by their planned names, on every rank."""
    entries = [entry for entry in tensors_to_save(runtime) if entry.planned is not None]
    ranks = range(runtime.mesh.layout.total_size)
    return {
        entry.owned: tensor.clone() for entry, tensor in full_tensors(runtime, entries, to=ranks)
    }


def trained(
    layout: dict[str, Any], asked: dict[str, Any], computes: torch.dtype, exact: bool
) -> dict[str, Tensor]:
    """Losses and norms of two steps, and the gradients and weights of the second, computed in a type."""

    def in_32_bits(runtime: Any, total: Tensor) -> Tensor:
        return stock(runtime, total if exact else total.float())  # as stages without a loss have it

    stock, patched = Runtime.sum_of_shares, patch.object(Runtime, "sum_of_shares", in_32_bits)
    in_type = patch.dict(MIXED_PRECISIONS, bf16_params=computes)
    with in_type, patched, keep_float64() if exact else nullcontext():
        model = built(layout, asked)
        runtime, optimizer = runtime_of(model), hfscale.create_optimizer(model, "sgd", lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        rank = hfscale.batch_rank(model)
        world = hfscale.batch_world(model)
        found = dict[str, Tensor]()
        for step in range(2):
            optimizer.zero_grad()
            batches = [ragged_batch(generator, 60, 2, 12, masked=i == step) for i in range(4)]
            found[f"loss {step}"] = hfscale.train_step(model, batches[rank::world])
            found[f"norm {step}"] = torch.as_tensor(hfscale.clip_grad_norm_(model, 1.0))
            optimizer.step()
        held = [(planned.name, p) for planned, p in runtime.parameters() if p.requires_grad]
        assert all(p.dtype == p.grad.dtype == torch.float32 for _, p in held)
        found |= whole(runtime)
        for _, parameter in runtime.parameters():
            gradient = parameter.grad
            local_tensor(parameter.detach()).copy_(
                torch.tensor(0.0) if gradient is None else local_tensor(gradient)
            )
        return found | {f"{name}.grad": tensor for name, tensor in whole(runtime).items()}


def compare(
    pools: Pools, layout: str, case: str, computes: torch.dtype, apart: float, exact: bool
) -> None:
    """Hold every rank's results to those of one process, by the largest entry of each."""
    asked = ASKED[case]
    sizes = LAYOUTS[layout]
    expected = pools(1).run(
        trained, {"ep_size": 1} if "ep_size" in sizes else {}, asked, computes, exact
    )[0]
    for found in pools(ParallelConfig(**sizes).total_size).run(
        trained, sizes, asked, computes, exact
    ):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            limit = apart * max(float(value.abs().max()), 1e-3)
            assert float((found[name].double() - value.double()).abs().max()) <= limit, name


EVERY = [
    (layout, case)
    for layout in LAYOUTS
    for case in ASKED
    if not ("ep_size" in LAYOUTS[layout] and case in ("tied", "gpt2", "kept in 32 bits"))
    and not (case == "gpt2" and layout in ("sequence", "regather", "pp2, tp2"))
    and not (case == "blocks" and layout == "regather")
    and not (case == "lora of experts" and "ep_size" not in LAYOUTS[layout])
]
DAILY = [
    ("sequence", "tied"),
    ("zbv", "frozen"),
    ("shard2", "kept in 32 bits"),
    ("tp2", "blocks"),
    ("1f1b", "lora"),
]


@pytest.mark.daily("1f1b-lora", "shard2-kept in 32 bits", "sequence-tied")
@pytest.mark.parametrize(("layout", "case"), cases(EVERY, daily=DAILY))
def test_every_layout_computes_what_one_process_does(pools: Pools, layout: str, case: str) -> None:
    """Parameters in float32 are cast to float64: only gradients, which are added up in float32, are rounded; beside
    stages, whose losses are in float32, and a router that is, norms and losses as well.
    """
    exact = "pp_size" not in LAYOUTS[layout] and case != "kept in 32 bits"
    compare(pools, layout, case, torch.float64, 1e-6 if exact else 1e-5, exact)


def stepped(**asked: Any) -> tuple[float, dict[str, Tensor], int]:
    """The loss of a step on two microbatches, its gradients, and the bytes that layers kept."""
    model = built({}, asked.pop("case", {}), **asked)
    generator = torch.Generator().manual_seed(1)
    runtime = runtime_of(model)
    batches = [ragged_batch(generator, 60, 2, 12, masked=False) for _ in range(2)]
    with count_saved(model, runtime.plan.layers, runtime.plan.head) as saved:
        loss = hfscale.train_step(model, batches)
    return (
        float(loss),
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        saved.layers,
    )


def test_one_step_is_that_of_a_model_in_16_bits_but_for_sums_of_gradients() -> None:
    loss, gradients, kept = stepped()
    pure_loss, pure, pure_kept = stepped(mixed_precision="no", dtype=torch.bfloat16)
    autocast = stepped(mixed_precision="bf16")
    assert (loss, kept) == (pure_loss, pure_kept)
    assert kept < 0.75 * autocast[2]
    for name, gradient in gradients.items():
        assert torch.allclose(
            gradient, pure[name].float(), rtol=2**-7, atol=2**-7 * float(gradient.abs().max())
        )


@pytest.mark.daily("elementwise", "blocks")
@pytest.mark.parametrize("case", ["full", "blocks", "elementwise", "offloaded"])
def test_memory_options_change_no_bit(case: str) -> None:
    expected = stepped()
    found = stepped(case=ASKED[case])
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def test_a_plain_loop_gives_the_gradients_of_a_step_inside_of_autocast_too() -> None:
    batch = ragged_batch(torch.Generator().manual_seed(1), 60, 2, 12, masked=False)
    model = built({}, ASKED["full"])
    loss = hfscale.train_step(model, batch)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(**batch).loss
    plain.backward()
    assert float(plain.detach()) == pytest.approx(float(loss), rel=1e-6)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=2**-7, atol=1e-6)


def test_states_and_checkpoints_are_in_32_bits(tmp_path: Path) -> None:
    batch = ragged_batch(torch.Generator().manual_seed(1), 60, 2, 12, masked=False)
    weights = []
    for part in ("saved", "loaded"):
        model = built({}, {})
        optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-3)
        if part == "loaded":
            hfscale.load_state(model, tmp_path / "state", optimizer=optimizer)
        for _ in range(1 if part == "loaded" else 2):
            optimizer.zero_grad()
            hfscale.train_step(model, batch)
            optimizer.step()
            if not (tmp_path / "state").exists():
                hfscale.save_state(model, tmp_path / "state", optimizer=optimizer)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    hfscale.save_pretrained(model, tmp_path / "out")
    again = hfscale.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), weights[0], strict=True))


def test_what_cannot_be_cast_is_refused() -> None:
    for family in ("xglm", "openai-gpt"):
        with pytest.raises(
            PlanError, match=f"'bf16_params' cannot be used with '{family}': this model converts"
        ):
            hfscale.from_config(config_of(family), **CAST)
    with pytest.raises(ConfigError, match="float8= needs mixed_precision='fp8', got 'bf16_params'"):
        hfscale.from_config(tiny("llama"), float8=hfscale.Float8Config(), **CAST)
