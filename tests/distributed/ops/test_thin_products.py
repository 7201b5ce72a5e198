"""Products of 16-bit activations with 32-bit factors: by blocks of rows, and by pieces as on GPUs."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hfscale.distributed.ops import thin_products
from hfscale.distributed.ops.thin_products import (
    add_from_thin,
    from_thin,
    thin_gradient,
    to_thin,
    with_from_thin,
)

ROWS, WIDTH, RANK = 37, 70, 3


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    factor = torch.randn(WIDTH, RANK, generator=generator) / 8
    thin = torch.randn(ROWS, RANK, generator=generator)
    return wide, factor, thin


def products(wide: Tensor, factor: Tensor, thin: Tensor) -> dict[str, Tensor]:
    return {
        "thin": to_thin(wide, factor, 0.5),
        "sum": add_from_thin(wide.clone(), thin, factor.t()),
        "gradient": thin_gradient(thin, wide),
        "transposed": thin_gradient(thin, wide, transposed=True),
    }


def exact(wide: Tensor, factor: Tensor, thin: Tensor) -> dict[str, Tensor]:
    wide, factor, thin = wide.double(), factor.double(), thin.double()
    return {
        "thin": 0.5 * wide @ factor,
        "sum": wide + thin @ factor.t(),
        "gradient": thin.t() @ wide,
        "transposed": wide.t() @ thin,
    }


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1 << 20, 5 * WIDTH, 1])
def test_blocks_of_rows_are_products_in_32_bits(dtype: torch.dtype, block: int) -> None:
    given = operands(dtype)
    wanted = exact(*given)
    with patch.object(thin_products, "_BLOCK", block):
        found = products(*given)
    for name, value in found.items():
        assert value.dtype == (dtype if name == "sum" else torch.float32)
        assert value.shape == wanted[name].shape
        if name == "sum":
            rounded = (given[0].float() + given[2] @ given[1].t()).to(dtype)
            torch.testing.assert_close(value, rounded, rtol=0, atol=0)
        else:
            assert distance(value, wanted[name]) < 2e-7


def test_three_pieces_are_as_exact_as_32_bits() -> None:
    given = operands(torch.bfloat16)
    wanted = exact(*given)
    with patch.object(thin_products, "splits", lambda *_: True):
        found = products(*given)
    plain = products(*given)
    for name in ("thin", "gradient", "transposed"):
        assert distance(found[name], wanted[name]) < 2e-7
    assert float((found["sum"] != plain["sum"]).float().mean()) < 1e-3
    pieces = thin_products.in_three(given[1], 1).double().unflatten(1, (3, -1))
    torch.testing.assert_close(pieces.sum(1), given[1].double(), rtol=2**-24, atol=0)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1])  # CUDA's own has all bits set
def test_what_is_no_number_stays_none(bits: int) -> None:
    factor = torch.tensor([[bits]], dtype=torch.int32).view(torch.float32)
    assert thin_products.in_three(factor, 1).isnan().any()


def test_compiled_code_multiplies_pieces_too() -> None:
    wide, factor, thin = operands(torch.bfloat16)
    wanted = exact(wide, factor, thin)
    with (
        patch.object(thin_products, "splits", lambda *_: True),
        patch.object(thin_products, "splits_for", lambda *_: True),
        patch.object(torch.compiler, "is_compiling", lambda: True),
    ):
        assert distance(to_thin(wide, factor, 0.5), wanted["thin"]) < 2e-7
        assert distance(thin_gradient(thin, wide), wanted["gradient"]) < 2e-7
        total = with_from_thin(wide, thin, factor.t())
        alone = from_thin(thin, factor.t(), wide.dtype)
    rounded = (wide.double() + thin.double() @ factor.t().double()).to(wide.dtype)
    assert float((total != rounded).float().mean()) < 1e-3
    assert float((alone != (thin @ factor.t()).to(wide.dtype)).float().mean()) < 1e-3


def test_a_compiler_leaves_pieces_as_they_are() -> None:
    """Compilers leave out casts to 16 bits and back, so what is left of a factor is not told by such casts."""
    graph = make_fx(lambda factor: torch.cat(thin_products._pieces(factor)))(torch.randn(4, 3))
    narrow = [node for node in graph.graph.nodes if "_to_copy" in str(node.target)]
    assert len(narrow) == 3
    assert {str(reader.target) for node in narrow for reader in node.users} == {"aten.cat.default"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's compiler
def test_pieces_by_torchs_compiler() -> None:
    factor = torch.randn(64, 48)
    torch.compiler.reset()
    found = torch.compile(thin_products.in_three, dynamic=True)(factor, 1)
    torch.compiler.reset()
    assert torch.equal(found, thin_products.in_three(factor, 1))


def test_one_type_is_multiplied_as_it_is() -> None:
    wide, factor, thin = (each.double() for each in operands(torch.float64))
    found, wanted = (make(wide, factor, thin) for make in (products, exact))
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-13, atol=1e-13)


def test_tensors_without_values_have_shapes() -> None:
    for name, value in products(*(each.to("meta") for each in operands(torch.bfloat16))).items():
        assert value.shape == exact(*operands(torch.bfloat16))[name].shape
