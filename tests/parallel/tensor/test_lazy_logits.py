"""Promised logits: whatever is done to them gives what the real ones would have given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfscale.parallel.tensor.lazy_logits import LazyLogits, defer_logits

CAP = torch.tensor(3.0, dtype=torch.float64)


def _made(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 7, dtype=dtype), torch.randn(2, 3, 4, dtype=dtype, requires_grad=True)


def _in_place(logits: Tensor) -> Tensor:
    logits /= 2
    logits.mul_(3).sub_(1)
    return logits


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "granite": lambda x: x / 8.0,
    "cohere": lambda x: x * 0.25,
    "gemma": lambda x: torch.tanh(x / 3.0) * 3.0,
    "capped last": lambda x: (x / 3.0).tanh(),
    "by a tensor": lambda x: x.float().mul(CAP).to(torch.float64),
    "reflected": lambda x: 2.0 - (1.0 + 3 * -x),
    "inverse": lambda x: 2.0 / (x + 5.0),
    "in place": _in_place,
    "no change": lambda x: x.contiguous().to(x.device).double(),
}
OTHER: dict[str, Callable[[Tensor], Any]] = {
    "indexed": lambda x: x[..., :-1, :],
    "softmax": lambda x: (x / 2).softmax(-1),
    "listed": lambda x: torch.cat([x, x * 2]),
    "by a vector": lambda x: x * torch.arange(7.0, dtype=torch.float64),
    "reshaped": lambda x: x.view(-1, 7),
    "two": lambda x: x + x,
    "row in place": lambda x: x.add(0).index_fill_(-1, torch.tensor([1]), 0.0),
}


@pytest.mark.parametrize("name", [*POINTWISE, *OTHER])
def test_like_the_real_ones(name: str) -> None:
    head, hidden = _made()
    function = {**POINTWISE, **OTHER}[name]
    found = function(defer_logits(head, hidden, True))
    expected = function(head(hidden))
    assert isinstance(found, LazyLogits) is (name in POINTWISE)
    assert (found.shape, found.dtype, found.requires_grad) == (expected.shape, expected.dtype, True)
    assert found.dim() == expected.dim()
    if name in POINTWISE:
        assert found.value is None
        found = found[...]
    torch.testing.assert_close(found, expected)
    leaves = (hidden, head.weight, head.bias)
    by_found, by_expected = (
        torch.autograd.grad(x.square().sum(), leaves) for x in (found, expected)
    )
    torch.testing.assert_close(by_found, by_expected)


def test_looking_keeps_the_graph_and_computes_once() -> None:
    head, hidden = _made()
    calls: list[int] = []
    lazy = defer_logits(lambda x: calls.append(len(x)) or head(x), hidden, True)  # type: ignore[func-returns-value]
    with torch.no_grad():
        assert lazy.argmax(-1).shape == (2, 3)
    assert lazy.sum().requires_grad
    lazy.mul_(2)  # now in the real ones
    torch.testing.assert_close(lazy.sum(), 2 * head(hidden).sum())
    assert calls == [0, 2]  # no row, to see the type; then all


def test_low_precision_follows_torch() -> None:
    head, hidden = _made(torch.bfloat16)
    lazy = defer_logits(head, hidden, True)
    assert (lazy / CAP).dtype == torch.bfloat16
    assert lazy.float().mul(2).dtype == torch.float32


def test_without_gradients() -> None:
    head, hidden = _made()
    with torch.no_grad():
        lazy = defer_logits(head, hidden, True)
    assert not lazy.requires_grad
    assert not lazy.sum().requires_grad


def test_a_scalar_that_changes_later_and_one_that_trains() -> None:
    head, hidden = _made()
    scale = torch.tensor(2.0, dtype=torch.float64)
    lazy = defer_logits(head, hidden, True) * scale
    scale.fill_(100.0)
    torch.testing.assert_close(lazy[...], 2 * head(hidden))
    assert not isinstance(defer_logits(head, hidden, True) * nn.Parameter(scale), LazyLogits)


def test_past_torch_functions_it_refuses() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * 2

    with pytest.raises(RuntimeError, match="without labels"):
        Double.apply(defer_logits(*_made(), True))
