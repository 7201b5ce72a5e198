"""Keep the routing state of a model: its forward passes, its counters, and what begins and ends a step."""

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
    """Hold the routing state that all mixtures of a model use.

    Attributes:
        options: the user's choices.
        passes: contexts of the model's forward passes; ``None`` where no layer needs them.
        counters: tokens per expert.
        biases: the router biases to update, by the name of the experts' module.
    """

    def __init__(self, runtime: Runtime, options: RoutingConfig) -> None:
        self.options, self._mesh = options, runtime.mesh
        self.passes = ForwardContexts(options.draws) if options.needs_tokens else None
        self.counters = Counters()
        self.biases: dict[str, Tensor] = {}

    @contextmanager
    def step(self, microbatches: Sequence[Mapping[str, Any]], train: bool) -> Iterator[None]:
        """Run the forward passes of one step over this rank's ``microbatches`` inside the with block."""
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
        """Record the loss gradient of the step for the latest pass's auxiliary losses, on a pipeline stage without the
        loss.
        """
        if self.passes is not None and self.passes.latest.loss is not None:
            self.passes.latest.scale = scale

    @torch.no_grad()
    def _move_biases(self) -> None:
        """Update the router biases from the loads of all batches, equally on every rank with a layer."""
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
