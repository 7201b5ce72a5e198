"""The three products of a projection: its output, and the gradients of its input and of its weight.

A projection whose products are made in another way than torch's own (in 8 bits, say) says so here; who takes its node
in autograd's graph apart (:mod:`.overlap`) asks for them, and need not know what they are.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .shared_casts import autocasted_weight

_ATTRIBUTE = "_hfscale_products"


class Products:
    """Torch's own. An instance is of one pass: what its output is made of may be noted for the gradients.

    Weights are ``[out, in]`` here, whichever way round a module keeps them.
    """

    def kept(self, weight: Tensor) -> Tensor:
        """What the backward pass is to find of a weight."""
        return autocasted_weight(weight)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x [..., in]`` -> ``[..., out]``."""
        return F.linear(x, weight, bias)

    def to_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """``grad [n, out]`` of the output -> ``[n, in]``."""
        return grad.mm(weight)

    def to_weight(self, grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
        """``grad [n, out]`` and ``x [n, in]`` -> the weight's gradient ``[out, in]``, or ``[in, out]``."""
        return x.t().mm(grad) if transposed else grad.t().mm(x)


def multiply_by(module: nn.Module, products: Callable[[], Products]) -> None:
    """Have a projection's products made by what ``products`` returns for each pass: by whoever makes them apart.

    Args:
        products: a function, or something else that a deep copy of the module may have.
    """
    setattr(module, _ATTRIBUTE, products)


def multiplied_by(module: Any) -> Callable[[], Products]:
    """What :func:`multiply_by` was given, or torch's own."""
    chosen: Callable[[], Products] = module.__dict__.get(_ATTRIBUTE, Products)
    return chosen


def products_of(module: Any) -> Products:
    """What makes the products of a projection in the pass that begins."""
    return multiplied_by(module)()
