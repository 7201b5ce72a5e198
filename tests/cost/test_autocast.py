"""Autocast on the meta device makes the types that torch's own makes on a device that computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hfscale._compat.torch import storage_key
from hfscale._compat.torch_fake import autocast_on_meta

WIDE = torch.float32
NARROW = torch.bfloat16
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: functional.linear(x, x),
    "matmul": lambda x: x @ x,
    "addmm": lambda x: torch.addmm(x[0], x, x),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "einsum": lambda x: torch.einsum("ab,bc->ac", x, x),
    "attention": lambda x: functional.scaled_dot_product_attention(*(x[None, None],) * 3),
    "softmax": lambda x: functional.softmax(x, -1),
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "pow": lambda x: x**2,
    "rsqrt": torch.rsqrt,
    "sum": lambda x: x.sum(-1),
    "gelu": functional.gelu,
    "add": lambda x: x + x,
}
WIDENED_ON_GPUS = {"softmax", "layer_norm", "pow", "rsqrt", "sum"}


@pytest.mark.parametrize("dtype", [WIDE, NARROW], ids=str)
def test_types_are_those_of_cpus(dtype: torch.dtype) -> None:
    for name, function in FUNCTIONS.items():
        with torch.autocast("cpu", dtype=NARROW):
            expected = function(torch.ones(4, 4, dtype=dtype)).dtype
        with autocast_on_meta("cpu"), torch.autocast("meta", dtype=NARROW):
            assert torch.is_autocast_enabled("meta")
            assert function(torch.ones(4, 4, dtype=dtype, device="meta")).dtype == expected, name


def test_gpus_widen_more() -> None:
    with autocast_on_meta("cuda"), torch.autocast("meta", dtype=NARROW):
        for name, function in FUNCTIONS.items():
            found = function(torch.ones(4, 4, dtype=NARROW, device="meta")).dtype
            assert found == (WIDE if name in WIDENED_ON_GPUS else NARROW), name


@pytest.mark.parametrize("trains", [True, False])
def test_copies_of_weights_are_told(trains: bool) -> None:
    """One of each for a pass, and one for each use of a view; none of anything else, nor outside."""
    weight = nn.Parameter(torch.ones(4, 4, device="meta"), requires_grad=trains)
    with autocast_on_meta("cuda") as copies:
        with torch.autocast("meta", dtype=torch.float16):
            out = functional.linear(functional.linear(weight.detach() * 2, weight), weight)
            assert out.dtype == torch.float16
            assert len(copies) == 1
            again = weight.to(torch.float16)
            functional.linear(out, weight.t())
        assert len(copies) == 3
        assert storage_key(again) in copies
        assert functional.linear(weight, weight).dtype == WIDE
        assert not torch.is_autocast_enabled("meta")
    assert len(copies) == 3
