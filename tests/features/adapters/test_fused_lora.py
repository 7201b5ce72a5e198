"""LoRA by one operator computes what PEFT's own code computes, keeps less, and leaves to it what it does not know."""

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoConfig

import hfscale
from hfscale import MemoryConfig, ParallelConfig
from hfscale.distributed.ops import thin_products
from hfscale.errors import ConfigError
from hfscale.features.adapters import fused_lora
from hfscale.features.memory.saved import count_saved
from hfscale.plan.feature_plans import FusedAdaptersPlan
from hfscale.testing import Case, RankPool, assert_layout_equal
from hfscale.train.runtime import runtime_of

from ...families import config_of
from ...tiny_models import tiny

# What PEFT says of biases as it saves them.
pytestmark = pytest.mark.filterwarnings("ignore:Adapter .default.. .* invalid shape")

Pools = Callable[[int], RankPool]
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {},
    "gpt2": {"lora": {"fan_in_fan_out": True}},
    "falcon": {},
    "mixtral": {
        "asked": {"experts_implementation": "eager"},
        "lora": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    },
    "biases": {"family": "llama", "config": {"attention_bias": True, "mlp_bias": True}},
    "lora_bias": {
        "family": "llama",
        "config": {"attention_bias": True, "mlp_bias": True},
        "lora": {"lora_bias": True},
    },
    "rslora": {"family": "llama", "lora": {"use_rslora": True, "rank_pattern": {"q_proj": 2}}},
}


def built(case: dict[str, Any], name: str = "llama", **asked: Any) -> Any:
    config = config_of(case.get("family", name), **case.get("config", {}))
    adapter = LoraConfig(**{**LORA, **case.get("lora", {})}, init_lora_weights=False)
    model = hfscale.from_config(
        config,
        **{"parallel": ParallelConfig(), "dtype": torch.float64, "peft_config": adapter}
        | case.get("asked", {})
        | asked,
    )
    return model.train()


def trained(model: Any, steps: int = 3, rate: float = 0.1) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of steps in a plain loop, and the gradients of the last one and the weights after it."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = {f"{name}.grad": p.grad for name, p in named if p.grad is not None}
    return losses, {**found, **{name: p.detach() for name, p in named}}


def counted(model: Any) -> int:
    """How many wrappers one pass computes by one operator."""
    with patch.object(fused_lora, "add_low_rank", wraps=fused_lora.add_low_rank) as seen:
        model(input_ids=IDS)
    return int(seen.call_count)


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_peft_and_trains_every_adapter(name: str) -> None:
    case = FAMILIES[name]
    fused = built(case, name)
    planned = runtime_of(fused).plan.feature(FusedAdaptersPlan)
    assert planned is not None
    assert not planned.others
    assert counted(fused) == planned.fused > 0
    losses, found = trained(fused)
    expected, wanted = trained(built(case, name, fused_adapters=False))
    assert losses == pytest.approx(expected, rel=1e-12)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
    factors = [key for key in found if "lora_" in key and not key.endswith(".grad")]
    assert factors
    for key in factors:
        assert found[f"{key}.grad"].abs().max() > 0, key


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "sp2": {"tp_size": 2, "sequence_parallel": True},
    "again": {"tp_size": 2, "sequence_parallel": True, "sequence_regather": True},
    "shard2": {"dp_shard_size": 2},
    "replicate2": {"dp_replicate_size": 2},
    "cp2": {"cp_size": 2},
    "zbv": {"pp_size": 2, "pipeline_schedule": "zbv", "num_microbatches": 2},
    "zero_bubble": {
        "pp_size": 2,
        "pipeline_schedule": "interleaved_zero_bubble",
        "virtual_stages": 2,
        "num_microbatches": 2,
    },
}
LEVERS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "elementwise": {"recompute": "elementwise"},
    "selective": {"recompute": "selective"},
    "mlp": {"recompute": ["mlp"]},
    "offload": {"offload_activations": "1"},
    "kept": {"recompute": "full", "recompute_keep": ["aten.mm", "aten.addmm"]},
}


@pytest.mark.daily("cp2-llama", "zbv-llama", "zero_bubble-gpt2", "sp2-biases", "replicate2-llama")
@pytest.mark.parametrize("name", ["llama", "gpt2", "biases", "lora_bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process(pools: Pools, layout: str, name: str) -> None:
    case = FAMILIES[name]
    sizes = {"num_hidden_layers": 4} if "pp_size" in LAYOUTS[layout] else {}
    _check(pools, tiny(case.get("family", name), **case.get("config", {}), **sizes), case, layout)


@pytest.mark.daily("elementwise-tp2", "full-zbv", "offload-shard2", "kept-tp2")
@pytest.mark.parametrize("layout", ["tp2", "shard2", "zbv"])
@pytest.mark.parametrize("lever", LEVERS)
def test_every_lever_equals_one_process(pools: Pools, lever: str, layout: str) -> None:
    sizes = {"num_hidden_layers": 4} if "pp_size" in LAYOUTS[layout] else {}
    _check(pools, tiny("llama", **sizes), {}, layout, memory=MemoryConfig(**LEVERS[lever]))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")
def test_attention_of_a_mixture_over_expert_ranks(pools: Pools) -> None:
    layout = ParallelConfig(ep_size=2, dp_shard_size=2)
    case = Case(config_of("mixtral"), steps=3, peft=LoraConfig(**LORA))
    assert_layout_equal(case, layout, pools(2))


def _check(pools: Pools, config: Any, case: dict[str, Any], layout: str, **asked: Any) -> None:
    parallel = ParallelConfig(**LAYOUTS[layout])
    adapter = LoraConfig(**{**LORA, **case.get("lora", {})})
    whole = Case(config, steps=3, peft=adapter, **asked)
    assert_layout_equal(whole, parallel, pools(parallel.total_size))


def _hooked(model: Any) -> int:
    """A hook on a module in a wrapper must run."""
    wrapper = _wrapper(model)
    seen: list[nn.Module] = []
    wrapper.lora_A["default"].register_forward_hook(lambda module, *_: seen.append(module))
    model(input_ids=IDS)
    assert seen
    return 1


def _replaced(model: Any) -> int:
    """As accelerate's hooks do it."""
    base = _wrapper(model).base_layer
    stock = base.forward
    base.forward = lambda x: stock(x) * 1.5
    return 1


def _switched_off(model: Any) -> int:
    _wrapper(model).enable_adapters(enabled=False)
    return 1


def _merged(model: Any) -> int:
    _wrapper(model).merge()
    return 1


def _second(model: Any) -> int:
    """Of two adapters PEFT adds both products."""
    _wrapper(model).update_layer("other", 2, lora_alpha=4, config=LoraConfig(**LORA))
    _wrapper(model).lora_B["other"].weight.data.fill_(0.1)
    _wrapper(model).set_adapter(["default", "other"])
    return 1


def _wrapper(model: Any) -> Any:
    return model.model.layers[1].self_attn.q_proj


@pytest.mark.parametrize("change", [_hooked, _replaced, _switched_off, _merged, _second])
def test_what_it_does_not_know_runs_as_it_is(change: Callable[[Any], int]) -> None:
    fused = built({})
    plain = built({}, fused_adapters=False)
    before = counted(fused)
    torch.manual_seed(0)
    left = change(fused)
    torch.manual_seed(0)
    change(plain)
    assert counted(fused) == before - left
    found, expected = (model(input_ids=IDS).logits for model in (fused, plain))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_dropout": 0.5}])
def test_variants_and_dropout_are_left_to_peft(changes: dict[str, Any]) -> None:
    fused = built({"lora": changes})
    planned = runtime_of(fused).plan.feature(FusedAdaptersPlan)
    assert planned is not None
    assert planned.fused == 0
    assert "by PEFT's own code" in str(runtime_of(fused).plan)
    assert counted(fused) == 0
    torch.manual_seed(0)
    losses, _ = trained(fused)
    torch.manual_seed(0)
    expected, _ = trained(built({"lora": changes}, fused_adapters=False))
    assert losses == expected


def test_a_copy_computes_with_its_own_factors() -> None:
    model = built({})
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    assert counted(other) == counted(model) > 0
    found, changed = (each(input_ids=IDS).logits for each in (model, other))
    assert not torch.allclose(found, changed)


def test_gradients_can_be_differentiated_again() -> None:
    penalties = []
    for fused in (True, False):
        model = built({}, fused_adapters=fused)
        factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
        hidden = torch.randn(
            2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        out = _wrapper(model)(hidden.requires_grad_())
        used = [p for n, p in factors.items() if "layers.1.self_attn.q_proj" in n]
        first = torch.autograd.grad(out.square().sum(), [hidden, *used], create_graph=True)
        again = torch.autograd.grad(sum(each.square().sum() for each in first), [hidden, *used])
        penalties.append([*first, *again])
    for found, expected in zip(*penalties, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_transforms_of_functions_run_as_in_stock_code() -> None:
    wrapper = _wrapper(built({}))
    x = torch.randn(3, 5, 32, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(wrapper)(x), wrapper(x))
    _, tangent = torch.func.jvp(wrapper, (x,), (x,))
    torch.testing.assert_close(tangent, wrapper(x))


def test_one_switch_turns_it_off() -> None:
    model = built({}, fused_adapters=False)
    assert counted(model) == 0
    assert runtime_of(model).plan.feature(FusedAdaptersPlan) is None
    with pytest.raises(ConfigError, match="fused_adapters='no' is not a switch"):
        built({}, fused_adapters="no")


@pytest.mark.parametrize("autocast", [False, True])
def test_factors_in_32_bits_beside_a_base_in_16(autocast: bool) -> None:
    """Gradients of factors are no farther from exact ones than PEFT's, and no copy of an input is kept."""
    errors = []
    kept = []
    for fused in (True, False):
        model = built({}, dtype=torch.bfloat16, fused_adapters=fused)
        wrapper = _wrapper(model)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
        grad = torch.randn(64, 32, generator=generator).bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = wrapper(x)
        out.backward(grad)
        a, b = (f["default"].weight for f in (wrapper.lora_A, wrapper.lora_B))
        exact_b = wrapper.scaling["default"] * grad.double().t() @ (x.double() @ a.double().t())
        exact_a = wrapper.scaling["default"] * (grad.double() @ b.double()).t() @ x.double()
        pairs = ((a.grad, exact_a), (b.grad, exact_b))
        errors.append(max(float(((g - e).norm() / e.norm()).detach()) for g, e in pairs))
        runtime = runtime_of(model)
        with count_saved(runtime.model, runtime.plan.layers, runtime.plan.head) as saved:
            hfscale.train_step(model, {"input_ids": IDS, "labels": IDS})
        kept.append(saved.layers)
    assert errors[0] <= errors[1] * 1.05
    assert errors[0] < (1e-2 if autocast else 5e-7)
    assert kept[0] < 0.8 * kept[1]


def test_twenty_steps_in_32_bits_equal_peft() -> None:
    losses, _ = trained(built({}, dtype=torch.float32), steps=20)
    expected, _ = trained(built({}, dtype=torch.float32, fused_adapters=False), steps=20)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0]


def test_pieces_train_as_peft_does() -> None:
    """What GPUs compute of factors in 32 bits beside a base in 16."""
    wanted, _ = trained(built({}, dtype=torch.bfloat16, fused_adapters=False), rate=1e-3)
    plain, _ = trained(built({}, dtype=torch.bfloat16), rate=1e-3)

    def of_two_types(wide: Tensor, factor: Tensor) -> bool:
        return wide.dtype != factor.dtype

    with patch.object(thin_products, "splits", of_two_types):
        found, _ = trained(built({}, dtype=torch.bfloat16), rate=1e-3)
    assert found == pytest.approx(wanted, rel=2e-3)
    assert found == pytest.approx(plain, rel=2e-3)


def test_gradients_under_autocast_are_not_differentiated_again() -> None:
    wrapper = _wrapper(built({}, dtype=torch.float32))
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = wrapper(x)
    with pytest.raises(RuntimeError, match="build the model with fused_adapters=False"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about gradients of views
def test_a_compiled_model_writes_into_what_adapters_return() -> None:
    """As Falcon's layers do, which add attention's output to the MLP's in place."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 67}
    config = AutoConfig.for_model("falcon", **sizes)
    adapter = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    found = []
    for how in (False, "aot_eager"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = hfscale.from_config(
            config, dtype=torch.float64, peft_config=adapter, compile=how
        ).train()
        loss = hfscale.train_step(model, {"input_ids": IDS % 67, "labels": IDS % 67})
        found.append([loss, *(x.grad for x in model.parameters() if x.grad is not None)])
    torch.compiler.reset()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def _norms_with_hooks(hooked: tuple[str, ...]) -> list[float]:
    """Norms of factors' gradients in a plain loop, with a hook that does nothing on another factor on each rank."""
    config = tiny("llama")
    parallel = ParallelConfig(tp_size=2)
    model = hfscale.from_config(config, parallel=parallel, dtype=torch.float64, seed=1)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2)
    adapted = hfscale.get_peft_model(model, lora, seed=2).train()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.02)
    for name, found in adapted.named_modules():
        if hooked and name.endswith(hooked[torch.distributed.get_rank()]):
            found.register_forward_hook(lambda *_: None)
    ids = torch.arange(24).view(2, 12)
    adapted(input_ids=ids, labels=ids).loss.backward()
    named = adapted.named_parameters()
    return [float(p.grad.norm()) for name, p in named if "lora_A" in name]


@pytest.mark.parametrize(
    "hooked",
    [
        ("1.self_attn.q_proj.lora_A.default", "1.self_attn.v_proj.lora_A.default"),
        ("0.self_attn.q_proj.base_layer", "nothing"),
    ],
)
@pytest.mark.filterwarnings("ignore:a hook on")
def test_hooks_on_some_ranks_alone(pools: Pools, hooked: tuple[str, ...]) -> None:
    expected = pools(2).run(_norms_with_hooks, ())
    for found in pools(2).run(_norms_with_hooks, hooked):
        assert found == pytest.approx(expected[0], rel=1e-12)
