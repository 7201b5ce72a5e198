"""fp8: in every layout the roundings of one process, entry by entry; test_torchao.py says that they are torchao's."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, MambaConfig
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

import hfscale
from hfscale import ConfigError, Float8Config, MemoryConfig, ParallelConfig, PlanError
from hfscale.distributed.ops.overlap import multiply_by
from hfscale.features.fp8.part import compute
from hfscale.features.fp8.scaled_matmul import (
    FORWARD,
    Float8Groups,
    Float8Products,
    on_tensor_cores,
)
from hfscale.models.family_limits import READ_BY_MIXERS
from hfscale.testing import RankPool
from hfscale.testing.parity import Batch, Case, assert_layout_equal
from tests.float8_reference import convert, float8_in_32_bits

from ...layouts import named
from ...mixtures import qwen3_moe
from ...sweeps import cases, pairs
from ...tiny_models import tiny

Pools = Callable[[int], RankPool]


@dataclass
class Float8Case(Case):
    """The reference is one process in fp8.

    Attributes:
        recipe: by tensors or by rows.
        left: what of the layers stays as it is, by parts of names.
        converts: gives a stock model such products; :func:`convert` by default.
    """

    recipe: str = "tensorwise"
    left: tuple[str, ...] = ()
    converts: Any = None

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        def chosen(module: nn.Module, name: str) -> bool:
            return (
                ".layers." in name
                and "lora_" not in name
                and not any(part in name for part in self.left)
            )

        if not hasattr(model, "converted"):
            (self.converts or convert)(model, self.recipe, chosen)
            model.converted = True
        return super().reference_step(model, step)

    def layout_step(self, model: Any, microbatches: list[Batch]) -> Tensor:
        with float8_in_32_bits():
            return super().layout_step(model, microbatches)


def case(recipe: str = "tensorwise", left: tuple[str, ...] = (), **changes: Any) -> Float8Case:
    asked = {"mixed_precision": "fp8", "float8": Float8Config(recipe, left)}
    config = tiny("llama", intermediate_size=48, num_hidden_layers=changes.pop("layers", 2))
    return Float8Case(config, asked=asked, recipe=recipe, left=left, **changes)


LAYOUTS = named("one", "tp2", "sequence", "regather", "1f1b", "zbv", "shard2", "replicate2", "cp2")


RECIPES = ("tensorwise", "rowwise")
DAILY = [("one", "rowwise"), ("tp2", "rowwise"), ("sequence", "tensorwise"), ("1f1b", "tensorwise")]
DAILY += [("shard2", "tensorwise"), ("cp2", "rowwise")]


@pytest.mark.daily("tp2-rowwise", "1f1b-tensorwise")
@pytest.mark.parametrize(("layout", "recipe"), pairs(LAYOUTS, RECIPES, daily=DAILY))
def test_a_layout_rounds_as_one_process(pools: Pools, layout: str, recipe: str) -> None:
    layers = 4 if layout == "zbv" else 2
    pool = None if layout == "one" else pools(2)
    assert_layout_equal(case(recipe, layers=layers), ParallelConfig(**LAYOUTS[layout]), pool)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2, "dp_shard_size": 2},
        {"tp_size": 2, "cp_size": 2},
        {"tp_size": 2, "pp_size": 2},
    ],
)
def test_products_of_axes(pools: Pools, sizes: dict[str, int], recipe: str) -> None:
    assert_layout_equal(case(recipe), ParallelConfig(**sizes), pools(4))


@pytest.mark.parametrize("layout", cases(["tp2", "sequence", "1f1b", "shard2"], daily=["sequence"]))
def test_adapters_over_a_base_in_8_bits(pools: Pools, layout: str) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    assert_layout_equal(case(peft=lora), ParallelConfig(**LAYOUTS[layout]), pools(2))


@pytest.mark.parametrize("layout", cases(["one", "ep2"], daily=["ep2"]))
def test_experts_and_routers_stay_as_they_are(pools: Pools, layout: str) -> None:
    mixture = replace(
        case(left=("mlp.",)), config=qwen3_moe(num_experts=16), asked={"mixed_precision": "fp8"}
    )
    one = layout == "one"
    assert_layout_equal(
        mixture, ParallelConfig() if one else ParallelConfig(ep_size=2), None if one else pools(2)
    )


def test_projections_that_a_mixer_does_not_call_stay_in_16_bits(pools: Pools) -> None:
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=67, time_step_rank=16)
    read = replace(
        case(left=("x_proj", "dt_proj", "out_proj")),
        config=config,
        asked={"mixed_precision": "fp8"},
    )
    assert_layout_equal(read, ParallelConfig(dp_shard_size=2), pools(2))


def test_every_projection_that_a_mixer_reads_is_known() -> None:
    read = re.compile(r"(?:weight=|= |^ +)self\.(\w*proj)\.weight(?: @|,$)", re.MULTILINE)
    found = dict[str, set[str]]()
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        place = importlib.util.find_spec(f"transformers.models.{model_type_to_module_name(family)}")
        for file in Path(place.origin).parent.glob("modeling_*.py") if place else ():
            found.setdefault(family, set()).update(read.findall(file.read_text()))
    known = {family: {*names} for family, names in READ_BY_MIXERS.items() if family in found}
    assert {family: names for family, names in found.items() if names} == known


@pytest.mark.parametrize("memory", cases(["full", "mlp"], daily=["full"]))
def test_recomputed_layers_are_rounded_alike(pools: Pools, memory: str) -> None:
    again = MemoryConfig(recompute="full" if memory == "full" else ["mlp"])
    assert_layout_equal(
        case(memory=again), ParallelConfig(tp_size=2, sequence_parallel=True), pools(2)
    )


def run(module: Any, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    out = module(x)
    out.backward(grad)
    linear = module.args[0] if isinstance(module, partial) else module
    return [out.detach(), x.grad, linear.weight.grad, linear.bias.grad]


def test_a_frozen_weight_keeps_no_input() -> None:
    linear = nn.Linear(32, 32).requires_grad_(False)
    multiply_by(linear, lambda: Float8Products(Float8Groups()))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = compute(linear, torch.randn(4, 32, requires_grad=True))
    assert [each.shape for each in kept] == [linear.weight.shape]
    out.sum().backward()


def test_weights_stored_the_other_way_round() -> None:
    torch.manual_seed(0)
    one = nn.Linear(32, 48)
    other = Conv1D(48, 32)
    with torch.no_grad():
        other.weight.copy_(one.weight.t())
        other.bias.copy_(one.bias)
    x = torch.randn(5, 32)
    grad = torch.randn(5, 48)
    for module in (one, other):
        multiply_by(module, lambda: Float8Products(Float8Groups(), rowwise=True))
    a, b = (
        run(partial(compute, module), x.clone().requires_grad_(), grad) for module in (one, other)
    )
    for expected, found in zip([*a[:2], a[2].t(), a[3]], b, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("rowwise", [True, False])
def test_torchs_kernel_is_what_is_emulated(rowwise: bool, fast: bool) -> None:
    """Torch has it on CPUs, too; sizes that are no multiples of 16 have zeros put behind them."""
    torch.manual_seed(0)
    a = torch.randn(5, 19).to(torch.float8_e4m3fn)
    b = torch.randn(19, 21).to(torch.float8_e4m3fn)
    of_a, of_b = (
        (torch.rand(5, 1) + 1, torch.rand(1, 21) + 1)
        if rowwise
        else (torch.tensor(2.0), torch.tensor(3.0))
    )
    found = on_tensor_cores(a, of_a, b, of_b, torch.bfloat16, fast)
    torch.testing.assert_close(
        found, ((a.float() / of_a) @ (b.float() / of_b)).bfloat16(), rtol=0.02, atol=0.02
    )


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("columns", [(1, 1), (16, 1), (1, 40), (40, 17)], ids=str)
def test_torchs_kernel_takes_every_shape(rowwise: bool, columns: tuple[int, int]) -> None:
    """Its meta function checks strides, multiples and scales as a GPU does; a size of 1 leaves strides undecided."""
    k, m = columns
    for n, fast, a_transposed, b_transposed in product((0, 1, 17), *[(False, True)] * 3):
        a = torch.empty(k, n, device="meta", dtype=FORWARD).t() if a_transposed else _empty(n, k)
        b = torch.empty(m, k, device="meta", dtype=FORWARD).t() if b_transposed else _empty(k, m)
        scales = [
            torch.empty(shape if rowwise else (), device="meta") for shape in ((n, 1), (1, m))
        ]
        assert on_tensor_cores(a, scales[0], b, scales[1], torch.bfloat16, fast).shape == (n, m)


def _empty(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, device="meta", dtype=FORWARD)


def test_a_matrix_without_entries_has_a_scale() -> None:
    products = Float8Products(Float8Groups())
    assert products.output(torch.zeros(0, 16), torch.randn(32, 16), None).shape == (0, 32)
    assert (
        Float8Products(Float8Groups(), True)
        .to_weight(torch.zeros(0, 32), torch.zeros(0, 16), False)
        .abs()
        .sum()
        == 0
    )


def test_the_plan_says_what_is_and_what_is_not() -> None:
    config = tiny("llama", hidden_size=64, intermediate_size=50)
    planned = hfscale.plan(
        config, mixed_precision="fp8", float8=Float8Config("rowwise", ["q_proj"])
    )
    text = str(planned)
    assert "products in 8 bits, scaled by rows: model.layers.*.self_attn.k_proj x2" in text
    assert "not in 8 bits (leave_out): model.layers.*.self_attn.q_proj x2" in text
    assert "not in 8 bits (sizes are no multiples of 16): model.layers.*.mlp.gate_proj x2" in text
    assert "lm_head" not in "".join(line for line in text.splitlines() if "8 bits" in line)
    mixture = str(hfscale.plan(qwen3_moe(num_experts=16), mixed_precision="fp8"))
    # Experts are no modules of their own, and routers no projections.
    assert "not in 8 bits" not in mixture
    assert "8 bits" not in str(hfscale.plan(config, mixed_precision="bf16"))


def test_what_cannot_work_is_refused() -> None:
    multi_query = tiny("llama", hidden_size=64, intermediate_size=48, num_key_value_heads=1)
    with pytest.raises(
        PlanError,
        match=r"one term of the weight gradients of .*k_proj.*leave_out=\['k_proj', 'v_proj'\]",
    ):
        hfscale.plan(multi_query, ParallelConfig(tp_size=2), mixed_precision="fp8")
    left = Float8Config(leave_out=["k_proj", "v_proj"])
    hfscale.plan(multi_query, ParallelConfig(tp_size=2), mixed_precision="fp8", float8=left)
    with pytest.raises(
        PlanError, match="no projection of the layers is called 'up_prj': did you mean 'up_proj'"
    ):
        hfscale.plan(multi_query, mixed_precision="fp8", float8=Float8Config(leave_out=["up_prj"]))
    with pytest.raises(PlanError, match="multiples of 16, but the model has none"):
        hfscale.plan(
            tiny("llama", hidden_size=40, num_attention_heads=5, num_key_value_heads=5),
            mixed_precision="fp8",
        )
    bits = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ConfigError, match="cannot be used with quantization_config"):
        hfscale.plan(multi_query, mixed_precision="fp8", quantization_config=bits)
    with pytest.raises(ConfigError, match=r"MX formats.*use 'rowwise'"):
        Float8Config("mxfp8")
    with pytest.raises(ConfigError, match="did you mean 'rowwise'"):
        Float8Config("rowise")
    with pytest.raises(ConfigError, match="leave_out='q_proj' is invalid"):
        Float8Config(leave_out="q_proj")
    with pytest.raises(ConfigError, match=r"float8= needs mixed_precision='fp8'"):
        hfscale.plan(multi_query, mixed_precision="bf16", float8=Float8Config())
