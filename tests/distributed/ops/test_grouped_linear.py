"""One linear layer per group of rows equals a loop over the groups, with gradients."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from hfscale.distributed.ops.grouped_linear import add_biases, grouped_linear, kernel_takes
from hfscale.parallel.pipeline.split import backward_of_input, backward_of_weights

from .pieces import Products


def layers(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int], transposed: bool
) -> Tensor:
    out = grouped_linear(x, weight, counts, transposed=transposed)
    return out if bias is None else add_biases(out, bias, counts)


def loop(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int], transposed: bool
) -> Tensor:
    """What it stands for."""
    out = []
    start = 0
    for group, count in enumerate(counts):
        matrix = weight[group] if transposed else weight[group].t()
        rows = x[start : start + count] @ matrix
        out.append(rows if bias is None else rows + bias[group])
        start += count
    return torch.cat(out)


def inputs(
    counts: list[int], wide: int, out: int, transposed: bool, biased: bool, seed: int
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(counts), wide, out) if transposed else (len(counts), out, wide)
    shapes = [(sum(counts), wide), shape, *([(len(counts), out)] if biased else [])]
    return [
        torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes
    ]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    wide=st.integers(1, 5),
    out=st.integers(1, 5),
    transposed=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_a_loop(
    counts: list[int], wide: int, out: int, transposed: bool, biased: bool, seed: int
) -> None:
    given_inputs = inputs(counts, wide, out, transposed, biased, seed)
    x, weight, *bias = given_inputs
    expected = loop(x, weight, bias[0] if bias else None, counts, transposed)
    found = layers(x, weight, bias[0] if bias else None, counts, transposed)
    torch.testing.assert_close(found, expected)
    grad = torch.randn(
        expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1)
    )
    for ours, theirs in zip(
        torch.autograd.grad(found, given_inputs, grad),
        torch.autograd.grad(expected, given_inputs, grad, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_each_half_of_a_backward_pass_makes_its_own_products() -> None:
    x, weight = inputs([2, 3], 4, 5, False, False, 0)
    output = grouped_linear(x * 1, weight, [2, 3]).sum()
    with Products() as first, torch.autograd.set_multithreading_enabled(False):
        split = backward_of_input(output, None, x, [weight])
    with Products() as second, torch.autograd.set_multithreading_enabled(False):
        backward_of_weights(split, [weight])
    assert first.shapes == [(2, 4), (3, 4)]
    assert second.shapes == [(5, 4), (5, 4)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0], [1]])
def test_gradients(counts: list[int], transposed: bool) -> None:
    x, weight, bias = inputs(counts, 3, 2, transposed, biased=True, seed=3)
    assert torch.autograd.gradcheck(lambda *a: layers(*a, counts, transposed), (x, weight, bias))


@pytest.mark.parametrize("trains", [(True, False), (False, True)])
def test_frozen(trains: tuple[bool, bool]) -> None:
    x, weight = (
        t.detach().requires_grad_(on)
        for t, on in zip(inputs([2, 0], 3, 2, False, False, 1), trains, strict=True)
    )
    grouped_linear(x, weight, [2, 0]).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == trains


def test_a_gradient_that_is_a_view_of_one_number() -> None:
    x, weight = inputs([2, 1], 3, 2, False, False, seed=1)
    grouped_linear(x, weight, [2, 1]).sum().backward()  # expanded, with strides of zero
    expected = torch.autograd.grad(loop(x, weight, None, [2, 1], False).sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), expected)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialized memory is NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("transposed", [False, True])
def test_a_group_without_rows_has_a_gradient_of_zero(transposed: bool) -> None:
    """Trap T11: weight decay and momentum treat it like every other."""
    counts = [0, 3, 0]
    x, weight, bias = inputs(counts, 4, 5, transposed, biased=True, seed=7)
    out = layers(x, weight, bias, counts, transposed)
    out.square().sum().backward()
    assert out.isfinite().all()
    for gradient in (weight.grad, bias.grad):
        assert gradient is not None
        assert gradient[1].abs().sum() > 0
        assert torch.equal(gradient[[0, 2]], torch.zeros_like(gradient[[0, 2]]))
    assert x.grad is not None
    assert x.grad.isfinite().all()


# Expert widths of the families in docs/families.md, some of them cut over 2 to 16 tensor ranks, and ranks of adapters.
WIDTHS = [1, 2, 4, 8, 16, 32, 44, 88, 100, 176, 352, 512, 704, 720, 768, 1408, 1536, 2880, 4864]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("hidden", [64, 2880, 2047])
def test_the_kernel_is_asked_for_what_it_takes(hidden: int, transposed: bool) -> None:
    """Against torch's own checks, for tensors that would be on a GPU: of a product, and of both its gradients."""
    with FakeTensorMode():
        offs = torch.empty(4, dtype=torch.int32, device="cuda")
        for width in WIDTHS:
            x, grad = (
                torch.empty(8, size, dtype=torch.bfloat16, device="cuda")
                for size in (hidden, width)
            )
            shape = (4, hidden, width) if transposed else (4, width, hidden)
            weight = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            matrix = weight if transposed else weight.transpose(1, 2)
            try:
                F.grouped_mm(x, matrix, offs=offs)
                F.grouped_mm(grad, matrix.transpose(1, 2), offs=offs)
                F.grouped_mm(*((x.t(), grad) if transposed else (grad.t(), x)), offs=offs)
                taken = True
            except RuntimeError:
                taken = False
            assert kernel_takes(x, weight) == taken, width
