"""Hide a block's backward collectives behind the gradients of its column projections' weights."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...families.projections import PROJECTIONS, is_transposed
from ...ops import WeightLater, enter, enter_overlapped, project
from ...ops.exchange import Started, start_all_reduce
from ...ops.overlap import narrowed
from ...ops.products import products_of
from .sequence_region import SequenceRegion


class Overlap:
    """The entry of one block: its column projections compute the gradients of their weights late."""

    def __init__(
        self, columns: list[nn.Module], group: dist.ProcessGroup, stream: SequenceRegion | None, regather: bool
    ) -> None:
        self.group, self.stream, self.regather = group, stream, regather
        # a subclass may compute something else
        self.columns: list[Any] = [module for module in columns if type(module) in PROJECTIONS]
        self._waiting: dict[nn.Module, WeightLater] = {}
        for module in self.columns:
            self._take_apart(module)

    def enter(self, x: Tensor) -> Tensor:
        """The block's input, as its projections see it."""
        stream = self.stream if self.stream is not None and self.stream.cut else None
        if torch.compiler.is_compiling():  # it puts collectives behind products by itself, and keeps no state for later
            return enter(x, self.group) if stream is None else stream.enter(x)
        columns = [module for module in self.columns if torch.is_grad_enabled() and module.weight.requires_grad]
        weights = [(module.weight, is_transposed(module)) for module in columns]
        gather, reduce = (None, self._start_sum) if stream is None else stream.collectives(x)
        # The gradient is a sum over projections that ran in the autocast's type, and it travels in that.
        if torch.is_autocast_enabled(x.device.type):
            reduce = narrowed(reduce, torch.get_autocast_dtype(x.device.type))
        x, later = enter_overlapped(x, weights, reduce, gather, self.regather)
        for module, each in zip(columns, later, strict=True):
            each.products = products_of(module)
        self._waiting = dict(zip(columns, later, strict=True))
        return x

    def _start_sum(self, grad: Tensor) -> Started:
        # A copy, since autograd may hand the same gradient tensor to another branch.
        return start_all_reduce(grad.clone(memory_format=torch.contiguous_format), self.group)

    def _take_apart(self, module: Any) -> None:
        forward = module.forward

        def forward_apart(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            later = self._waiting.pop(module, None)
            return forward(x, *args, **kwargs) if later is None else project(x, later, module.bias)

        module.forward = forward_apart
