"""Hide a block's backward collectives behind the gradients of its column projections' weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...families.projections import PROJECTIONS, is_transposed
from ...ops import WeightLater, enter, enter_overlapped, project
from ...ops.exchange import Started, start_all_reduce
from ...ops.overlap import Regather, as_it_is, narrowed
from ...ops.products import products_of
from .sequence_region import SequenceRegion


class Overlap:
    """The entry of one block, whose column projections defer their weight gradients until its collectives run.

    Attributes:
        gathered: re-gathers the latest input in the backward pass; ``None`` without ``sequence_regather``.
    """

    def __init__(
        self, columns: list[nn.Module], group: dist.ProcessGroup, stream: SequenceRegion | None, regather: bool
    ) -> None:
        self.group, self.stream, self.regather = group, stream, regather
        # exact types: a subclass may compute something else
        self.columns: list[Any] = [module for module in columns if type(module) in PROJECTIONS]
        self._low_rank: dict[Any, Callable[[Tensor], Tensor]] = {}
        self._waiting: dict[nn.Module, WeightLater] = {}
        self.gathered: Regather | None = None
        for module in self.columns:
            self._take_apart(module)

    def enter(self, x: Tensor) -> Tensor:
        """Return the block's input as its projections see it; backward overlaps its collectives."""
        self.gathered = None
        stream = self.stream if self.stream is not None and self.stream.cut else None
        if torch.compiler.is_compiling():  # the compiler overlaps collectives itself, and cannot keep this state
            return enter(x, self.group) if stream is None else stream.enter(x)
        regather = self.regather and stream is not None
        asked = {**dict.fromkeys(self.columns, as_it_is), **(self._low_rank if regather else {})}
        reads = {each: read for each, read in asked.items() if torch.is_grad_enabled() and each.weight.requires_grad}
        weights = [(read(module.weight), is_transposed(module)) for module, read in reads.items()]
        gather, reduce = (None, self._start_sum) if stream is None else stream.collectives(x)
        # The gradient is a sum over projections that ran in the autocast dtype: send it in that.
        if torch.is_autocast_enabled(x.device.type):
            reduce = narrowed(reduce, torch.get_autocast_dtype(x.device.type))
        x, later = enter_overlapped(x, weights, reduce, gather, self.regather)
        for module, each in zip(reads, later, strict=True):
            each.products = products_of(module)
        self._waiting = dict(zip(reads, later, strict=True))
        self.gathered = later[0].regather if later else None
        return x

    def read_by(self, low_rank: Any, read: Callable[[Tensor], Tensor]) -> None:
        """Defer the weight gradient of ``low_rank`` (LoRA's A) too, so that the re-gathered input need not be saved.

        Args:
            read: returns its weight as its computation should see it.
        """
        if type(low_rank) in PROJECTIONS:
            self._low_rank[low_rank] = read
            self._take_apart(low_rank)

    def _start_sum(self, grad: Tensor) -> Started:
        # A copy, since autograd may hand the same gradient tensor to another branch.
        return start_all_reduce(grad.clone(memory_format=torch.contiguous_format), self.group)

    def _take_apart(self, module: Any) -> None:
        forward = module.forward

        def forward_apart(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            later = self._waiting.pop(module, None)
            return forward(x, *args, **kwargs) if later is None else project(x, later, module.bias)

        module.forward = forward_apart
