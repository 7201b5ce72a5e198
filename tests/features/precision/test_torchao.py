"""fp8 is torchao's, bit for bit, and a layout equals one process that torchao has converted: make test-torchao."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hfscale import ParallelConfig
from hfscale.distributed.ops.overlap import multiply_by
from hfscale.features.fp8.part import compute
from hfscale.features.fp8.scaled_matmul import Float8Groups, Float8Products
from hfscale.testing import RankPool
from hfscale.testing.parity import Batch, assert_layout_equal
from tests.float8_reference import in_32_bits

from .test_float8 import LAYOUTS, RECIPES, Float8Case, case, run

pytestmark = pytest.mark.torchao
Pools = Callable[[int], RankPool]


def emulated(recipe: str) -> Any:
    """Its configuration."""
    from torchao.float8 import Float8LinearConfig

    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_projection_is_torchaos_bit_for_bit(recipe: str, dtype: torch.dtype) -> None:
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    ours = nn.Linear(64, 48, dtype=dtype)
    theirs = Float8Linear.from_float(copy.deepcopy(ours), config=emulated(recipe))
    multiply_by(ours, lambda: Float8Products(Float8Groups(), recipe == "rowwise"))
    x = torch.randn(3, 11, 64, dtype=dtype)
    grad = torch.randn(3, 11, 48, dtype=dtype)
    found = [
        run(module, x.clone().requires_grad_(), grad) for module in (partial(compute, ours), theirs)
    ]
    for name, a, b in zip("oxwb", *found, strict=True):
        assert torch.equal(a, b), name


def convert(model: nn.Module, recipe: str, chosen: Callable[[nn.Module, str], bool]) -> None:
    """By torchao."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=chosen, config=emulated(recipe))


@contextmanager
def in_float64() -> Iterator[None]:
    """Within: what torchao has in 8 bits is multiplied in 64, so that the order of a sum is nothing to be seen."""
    from torchao.float8 import float8_ops, float8_utils

    def product(_: Any, args: Any, __: Any = None) -> Tensor:
        a, b = (each._data.double() / each._scale for each in args)
        return a.mm(b).to(args[0]._orig_dtype)

    def power_of_two(scale: Tensor) -> Tensor:  # torchao's own takes 32 bits alone
        return scale.log2().floor().exp2()

    table = mock.patch.dict(float8_ops.FLOAT8_OPS_TABLE, {torch.ops.aten.mm.default: product})
    rounding = mock.patch.object(float8_utils, "_round_scale_down_to_power_of_2", power_of_two)
    with table, rounding, in_32_bits(float8_utils, "amax_to_scale"):
        yield


class TorchaoCase(Float8Case):
    """The reference is converted by torchao."""

    def reference_step(self, model: Any, step: list[list[Batch]]) -> list[Tensor]:
        with in_float64():
            return super().reference_step(model, step)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_one_process_of_torchaos(pools: Pools, layout: str, recipe: str) -> None:
    found = TorchaoCase(
        **{**vars(case(recipe, layers=4 if layout == "zbv" else 2)), "converts": convert}
    )
    assert_layout_equal(
        found, ParallelConfig(**LAYOUTS[layout]), None if layout == "one" else pools(2)
    )
