"""Put the exchange of tokens in the place of the forward pass of a stock module of experts.

The stock block around it is unchanged: it asks its router, calls ``experts(hidden, index, weights)`` with the numbers
of *all* experts, and gets the weighted sums for its tokens. Where tensor ranks share a batch and each has whole
experts, every one sends a share of the tokens, so that no token is computed twice; under sequence parallelism it has
but a share to begin with.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.transformers.experts import runs_grouped_products
from ...config.routing import RoutingConfig
from ...distributed.ops.collectives import (
    copy_to_tp_region,
    gather_from_tp_region,
    reduce_from_tp_region,
    scatter_to_tp_region,
)
from ...distributed.ops.grouped_linear import ALIGNED
from ...distributed.ops.packed_weights import packings_of
from ...plan.cut import share_evenly
from ...train.runtime import Runtime
from ...train.runtime.parameter_names import unwrapped
from .capacity_buffers import through_slots
from .dispatch import Routes, combine, dispatch, plan_routes
from .expert_routing import routing_of_layers
from .grouped import compute_type, run_experts
from .layer import LayerRouting, Routing
from .router_functions import count_each


class Mixture:
    """Run the experts of one layer on tokens of ``batches`` distinct batches, exchanged over ranks and along routes
    that ``routing`` changes and counts. ``shares`` are tensor ranks that each send a part of one batch.
    """

    def __init__(self, routing: LayerRouting) -> None:
        mesh, layout = routing.mesh, routing.mesh.layout
        self.routing, self.group, self.batches = routing, mesh.group("ep"), layout.expert_batches
        self.shares, self.count = mesh.tp_group if layout.slices_tokens else None, routing.planned.count

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Replace the stock ``experts(hidden [n, h], index [n, k], weights [n, k])`` with this rank's ``experts``."""
        choice = self.routing.choose(index, weights)
        if choice.places is None:
            out = self._routed(experts, hidden, choice.index, choice.weights)
        else:
            self.routing.count(count_each(choice.index.flatten(), self.count + 1)[:-1])  # on the device
            compute, count = partial(run_experts, experts), self.count
            out = through_slots(
                hidden, choice.weights, choice.places, count, choice.slots, compute, self.group, self.batches
            )
        return self.routing.finish(out, choice)

    def _routed(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Send a slice of the tokens from each tensor rank; or all-reduce outputs, where that sends no more bytes."""
        if self.shares is None or self.routing.is_cut():
            return self._exchanged(experts, hidden, index, weights)
        if self.batches == 1 and 2 * index.shape[1] >= dist.get_world_size(self.shares):
            return self._summed(experts, hidden, index, weights, self.shares)
        size, rank = dist.get_world_size(self.shares), dist.get_rank(self.shares)
        lengths = share_evenly(hidden.shape[0], size)
        own_index = index.narrow(0, sum(lengths[:rank]), lengths[rank])
        own_hidden, own_weights = (scatter_to_tp_region(x, lengths, self.shares, 0) for x in (hidden, weights))
        out = self._exchanged(experts, own_hidden, own_index, own_weights)
        return gather_from_tp_region(out, lengths, self.shares, 0)

    def _summed(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, ranks: dist.ProcessGroup
    ) -> Tensor:
        """Run this rank's experts on all tokens, and all-reduce the outputs."""
        own = self.count // dist.get_world_size(ranks)
        before = dist.get_rank(ranks) * own
        local = index - before
        local = local.masked_fill((local < 0) | (local >= own), own)
        routes, counts = plan_routes(local, own, None)
        self.routing.count([0] * before + counts + [0] * (self.count - before - own))
        entered = copy_to_tp_region(hidden.to(compute_type(experts, hidden)), ranks)
        out = through_experts(experts, entered, copy_to_tp_region(weights, ranks), routes)
        return reduce_from_tp_region(out, ranks).to(hidden.dtype)

    def _exchanged(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        routes, counts = plan_routes(index, self.count, self.group)
        self.routing.count(counts)
        computed = through_experts(experts, hidden.to(compute_type(experts, hidden)), weights, routes, self.batches)
        return computed.to(hidden.dtype)


def through_experts(experts: Any, hidden: Tensor, weights: Tensor, routes: Routes, batches: int = 1) -> Tensor:
    """Send tokens ``hidden [n, h]`` through their experts on all ranks and back, weighted by ``weights [n, k]``."""
    grouped = run_experts(experts, dispatch(hidden, routes, batches), routes.counts)
    return combine(grouped, weights, routes, batches)


def install_experts(runtime: Runtime, options: RoutingConfig | None = None) -> Routing | None:
    """Make expert modules exchange tokens with other ranks, and return what they share; ``None`` where they stay stock:
    on one rank without routing options whose experts are neither quantized nor adapted, nor cut to sizes that grouped
    matmuls refuse, nor cast for several microbatches at once.

    Comes before the edges of tensor parallelism, which may read parameters of experts in their own way.
    """
    mesh = runtime.mesh
    modules = [runtime.model.get_submodule(e.name) for e in runtime.plan.mixtures if runtime.is_local(e.name)]
    changed = any(unwrapped(module) is not module or packings_of(unwrapped(module)) for module in modules)
    narrow = mesh.tp_group is not None and any(
        _too_narrow(module, runtime.options.mixed_precision) for module in modules
    )
    copies = bool(modules) and runtime.shares_casts  # of which the host would make one for each microbatch
    if mesh.group("ep") is None and options is None and not (changed or narrow or copies):
        return None
    routing, layers = routing_of_layers(runtime, options)
    for layer in layers:
        module: Any = runtime.model.get_submodule(layer.planned.name)
        module.forward = partial(Mixture(layer).run, module)
    return routing


def _too_narrow(experts: nn.Module, mixed_precision: str) -> bool:
    """Return whether torch's grouped matmul rejects the row sizes of a shard of ``experts``."""
    if not runs_grouped_products(experts):
        return False
    weights = [parameter for parameter in experts.parameters() if parameter.ndim == 3]
    size = 2 if mixed_precision != "no" else min((weight.element_size() for weight in weights), default=ALIGNED)
    return any(dim * size % ALIGNED for weight in weights for dim in weight.shape[1:])
