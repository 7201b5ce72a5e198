"""The routing of a whole model: its passes, what it counts, and what a step begins and ends with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config.routing import RoutingConfig
from ...train.runtime import Runtime
from .balance import bias_step
from .forward_contexts import ForwardContexts, real_tokens
from .token_counts import Counters, LayerCounter


class Routing:
    """What all mixtures of a model have in common.

    Attributes:
        options: what the user asked for.
        passes: its forward passes; ``None`` where no layer needs to know of them.
        counters: tokens per expert.
        biases: what the bias update moves, by the name of the experts' module.
    """

    def __init__(self, runtime: Runtime, options: RoutingConfig) -> None:
        self.options, self._mesh = options, runtime.mesh
        self.passes = ForwardContexts(options.draws) if options.needs_tokens else None
        self.counters = Counters()
        self.biases: dict[str, Tensor] = {}

    @contextmanager
    def step(self, microbatches: Sequence[Mapping[str, Any]], train: bool) -> Iterator[None]:
        """Within: the forward passes of one step over this rank's ``microbatches``."""
        self.counters.begin()
        if self.passes is None:
            yield
            return
        if self.options.has_loss:
            real = torch.stack([real_tokens(microbatch).sum() for microbatch in microbatches]).sum()
            for group in self._mesh.loss_groups:
                dist.all_reduce(real, group=group)
            self.passes.tokens = real
        try:
            yield
        finally:
            self.passes.tokens = None
        if train and self.biases:
            self._move_biases()

    def note_scale(self, scale: float) -> None:
        """The gradient that the step's backward passes begin with, for what the latest pass's layers add to the loss:
        told where the pass itself ends without one, in a pipeline stage.
        """
        if self.passes is not None and self.passes.latest.loss is not None:
            self.passes.latest.scale = scale

    @torch.no_grad()
    def _move_biases(self) -> None:
        """Every rank with a layer makes the same step, from the load of all batches together."""
        counters = [self.counters.layers[name] for name in self.biases]
        flat = torch.cat([_wanted(counter, bias) for counter, bias in zip(counters, self.biases.values(), strict=True)])
        for group in (*self._mesh.loss_groups, *self._mesh.groups("tp")):
            dist.all_reduce(flat, group=group)
        for bias, counts in zip(self.biases.values(), flat.split([c.count for c in counters]), strict=True):
            bias += bias_step(counts, self.options.bias_update_rate).to(bias.dtype).view_as(bias)


def _wanted(counter: LayerCounter, bias: Tensor) -> Tensor:
    if counter.wanted is None:
        return torch.zeros(counter.count, dtype=torch.int64, device=bias.device)
    return counter.wanted
