"""The three matrix products of a projection: its output, and the gradients of its input and of its weight.

A projection with products other than torch's own (in 8 bits, say) registers them here; :mod:`.overlap`, which splits
the projection's autograd node, asks for them and need not know what they are.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .shared_casts import autocasted_weight

_ATTRIBUTE = "_hfscale_products"


class Products:
    """Torch's own products. An instance serves one pass: it may note operands of the output for the gradients.

    Weights are ``[out, in]`` here, whichever way round a module keeps them.
    """

    def kept(self, weight: Tensor) -> Tensor:
        """Return the form of the weight to save for the backward pass."""
        return autocasted_weight(weight)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output ``[..., out]`` of ``x [..., in]``."""
        return F.linear(x, weight, bias)

    def to_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the input's gradient ``[n, in]``, given that of the output, ``grad [n, out]``."""
        return grad.mm(weight)

    def to_weight(self, grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
        """Return the weight's gradient ``[out, in]``, or ``[in, out]``, of ``grad [n, out]`` and ``x [n, in]``."""
        return x.t().mm(grad) if transposed else grad.t().mm(x)


def multiply_by(module: nn.Module, products: Callable[[], Products]) -> None:
    """Set the ``products`` of a projection, which :mod:`.overlap` then uses.

    Args:
        products: returns those of a pass that begins: a function, or an object that deep copies of the module may
            share.
    """
    setattr(module, _ATTRIBUTE, products)


def multiplied_by(module: Any) -> Callable[[], Products]:
    """Return what :func:`multiply_by` set, or torch's own."""
    chosen: Callable[[], Products] = module.__dict__.get(_ATTRIBUTE, Products)
    return chosen


def products_of(module: Any) -> Products:
    """Return the products of a projection for the pass that begins."""
    return multiplied_by(module)()
