"""Put the exchange of tokens in the place of the forward pass of a stock module of experts.

The stock block around it is unchanged: it asks its router, calls ``experts(hidden, index, weights)`` with the numbers
of *all* experts, and gets the weighted sums for its tokens. Where tensor ranks share a batch and each has whole
experts, every one sends a share of the tokens, so that no token is computed twice; under sequence parallelism it has
but a share to begin with.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.peft import terms_of_experts
from ..._compat.transformers.experts import apply_gate, runs_grouped_products
from ...config.routing import RoutingConfig
from ...distributed.ops import collectives
from ...distributed.ops.grouped_linear import ALIGNED, frozen_grouped_linear, grouped_linear
from ...distributed.ops.quantized_weights import encodings_of, read_quantized
from ...distributed.ops.shared_casts import cast_weight
from ...plan.cut import share_evenly
from ...train.runtime import Runtime, local_tensor
from ...train.runtime.parameter_names import unwrapped
from .dispatch import Routes, combine, dispatch, plan_routes
from .expert_routing import routing_of_layers
from .layer import LayerRouting, Routing
from .router_functions import count_each


class Mixture:
    """Run a layer's experts on tokens of ``batches`` batches; tensor ranks ``shares`` each send a part of one."""

    def __init__(self, routing: LayerRouting) -> None:
        mesh = routing.mesh
        layout = routing.mesh.layout
        self.routing, self.group, self.batches = routing, mesh.group("ep"), layout.expert_batches
        self.shares = mesh.tp_group if layout.slices_tokens else None
        self.count = routing.planned.count

    def run(
        self,
        experts: nn.Module,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Replace the stock ``experts(hidden [n, h], index [n, k], weights [n, k])`` with this rank's ``experts``."""
        choice = self.routing.choose(index, weights)
        if choice.places is None:
            out = self._routed(experts, hidden, choice.index, choice.weights)
        else:
            # On the device.
            self.routing.count(count_each(choice.index.flatten(), self.count + 1)[:-1])
            given = hidden, choice.weights, choice.places, self.count, choice.slots
            out = through_slots(*given, partial(run_experts, experts), self.group, self.batches)
        return self.routing.finish(out, choice)

    def _routed(
        self,
        experts: nn.Module,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """Send a slice of the tokens from each tensor rank; or all-reduce outputs, where that sends no more bytes."""
        if self.shares is None or self.routing.is_cut():
            return self._exchanged(experts, hidden, index, weights)
        if self.batches == 1 and 2 * index.shape[1] >= dist.get_world_size(self.shares):
            return self._run_on_all_tokens(experts, hidden, index, weights, self.shares)
        size = dist.get_world_size(self.shares)
        rank = dist.get_rank(self.shares)
        lengths = share_evenly(hidden.shape[0], size)
        own_index = index.narrow(0, sum(lengths[:rank]), lengths[rank])
        own_hidden, own_weights = (
            collectives.scatter_to_tp_region(x, lengths, self.shares, 0) for x in (hidden, weights)
        )
        out = self._exchanged(experts, own_hidden, own_index, own_weights)
        return collectives.gather_from_tp_region(out, lengths, self.shares, 0)

    def _run_on_all_tokens(
        self,
        experts: nn.Module,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        ranks: dist.ProcessGroup,
    ) -> Tensor:
        """Run this rank's experts on all tokens, and all-reduce the outputs."""
        own = self.count // dist.get_world_size(ranks)
        before = dist.get_rank(ranks) * own
        local = index - before
        local = local.masked_fill((local < 0) | (local >= own), own)
        routes, counts = plan_routes(local, own, None)
        self.routing.count([0] * before + counts + [0] * (self.count - before - own))
        entered = collectives.copy_to_tp_region(hidden.to(compute_type(experts, hidden)), ranks)
        out = through_experts(
            experts, entered, collectives.copy_to_tp_region(weights, ranks), routes
        )
        return collectives.reduce_from_tp_region(out, ranks).to(hidden.dtype)

    def _exchanged(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        routes, counts = plan_routes(index, self.count, self.group)
        self.routing.count(counts)
        computed = through_experts(
            experts, hidden.to(compute_type(experts, hidden)), weights, routes, self.batches
        )
        return computed.to(hidden.dtype)


def through_experts(
    experts: Any, hidden: Tensor, weights: Tensor, routes: Routes, batches: int = 1
) -> Tensor:
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
    modules = [
        runtime.model.get_submodule(e.name)
        for e in runtime.plan.mixtures
        if runtime.is_local(e.name)
    ]
    changed = any(
        unwrapped(module) is not module or encodings_of(unwrapped(module)) for module in modules
    )
    narrow = mesh.tp_group is not None and any(
        _too_narrow(module, runtime.options.mixed_precision) for module in modules
    )
    # Of which the host would make one for each microbatch.
    copies = bool(modules) and runtime.shares_casts
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
    size = (
        2
        if mixed_precision != "no"
        else min((weight.element_size() for weight in weights), default=ALIGNED)
    )
    return any(dim * size % ALIGNED for weight in weights for dim in weight.shape[1:])


def through_slots(
    hidden: Tensor,
    weights: Tensor,
    places: Tensor,
    count: int,
    slots: Sequence[int],
    compute: Callable[[Tensor, list[int]], Tensor],
    group: dist.ProcessGroup | None,
    batches: int,
) -> Tensor:
    """Send tokens to their experts in buffers of fixed capacity, and return the combined outputs ``[n, h]``.

    Every rank sends ``slots`` rows to each expert, used or not, so that the host never waits for the device; unused
    ones are zero, without a gradient. For gradients of several batches see :mod:`.dispatch`. The ``places [n, k]`` are
    each route's slot, ``expert * slots + place``, ``count * slots`` for dropped ones; ``compute`` gets rows ``[r, h]``,
    and how many of them each of this rank's experts has.
    """
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    local = count // ranks
    own = slots[rank]
    width = hidden.shape[-1]
    k = places.shape[1]
    rows = hidden if k == 1 else hidden.repeat_interleave(k, 0)
    # One extra row receives the dropped routes, and is cut off.
    buffer = hidden.new_zeros(count * own + 1, width).index_copy(0, places.flatten(), rows)[:-1]
    send = [local * own] * ranks
    receive = [local * other for other in slots]
    if group is not None:
        buffer = _exchanged(buffer, send, receive, group, float(batches))
    by_sender = [
        part.view(local, other, width)
        for part, other in zip(buffer.split(receive), slots, strict=True)
    ]
    grouped = torch.cat(by_sender, 1).flatten(0, 1)
    out = compute(grouped, [sum(slots)] * local).view(local, sum(slots), -1)
    leaving = torch.cat([part.flatten(0, 1) for part in out.split(list(slots), 1)])
    if group is not None:
        leaving = _exchanged(leaving, receive, send, group, 1.0 / batches)
    back = torch.cat((leaving, leaving.new_zeros(1, leaving.shape[-1])))
    return (back[places] * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _exchanged(
    rows: Tensor,
    send: list[int],
    receive: list[int],
    group: dist.ProcessGroup,
    factor: float,
) -> Tensor:
    """Exchange rows by all-to-all; multiply the gradients by ``factor`` on their way back."""
    return collectives.apply_mapping(
        rows,
        lambda rows: collectives.all_to_all(rows, send, receive, group),
        lambda grad: collectives.all_to_all(grad * factor, receive, send, group),
    )


def compute_type(experts: Any, x: Tensor) -> torch.dtype:
    """Return the dtype that the transformers module ``experts`` computes in now, given input ``x``."""
    experts = unwrapped(experts)
    weight: Tensor = experts.down_proj
    # Which it leaves alone.
    if torch.is_autocast_enabled(weight.device.type) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(weight.device.type)
    encoding = encodings_of(experts).get("down_proj")
    return weight.dtype if encoding is None else encoding.compute_dtype or x.dtype


def run_experts(experts: Any, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute a stock module of experts on ``x [rows, h]``, ``counts`` per expert; parameters are looked up anew."""
    dtype = compute_type(experts, x)
    added, experts = low_rank_terms(experts), unwrapped(experts)
    biased = experts.has_bias
    transposed = experts.is_transposed

    def linear(x: Tensor, name: str) -> Tensor:
        out = whole_rank(x, name)
        for a, b, scaling in added.get(name, ()):
            inner = grouped_linear(x, a.to(dtype), None, counts)
            out = out + scaling * grouped_linear(inner, b.to(dtype), None, counts)
        return out

    def whole_rank(x: Tensor, name: str) -> Tensor:
        bias = local_tensor(getattr(experts, f"{name}_bias")).to(dtype) if biased else None
        if name in encodings_of(experts):
            # dequantized in each of both passes (QLoRA, Dettmers et al. 2023)
            return frozen_grouped_linear(
                x,
                lambda dtype: read_quantized(experts, name).to(dtype),
                bias,
                counts,
                transposed=transposed,
            )
        weight = cast_weight(local_tensor(getattr(experts, name)), dtype)
        return grouped_linear(x, weight, bias, counts, transposed=transposed)

    if experts.has_gate:
        inner = apply_gate(experts, linear(x.to(dtype), "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(x.to(dtype), "up_proj"))
    out = linear(inner, "down_proj")
    return experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out


def low_rank_terms(experts: Any) -> dict[str, list[tuple[Tensor, Tensor, float]]]:
    """Return the LoRA factors of each expert parameter, ``A [e, r, in]``, ``B [e, out, r]`` and their scale. PEFT adds
    ``B A`` to the weights of all experts before it computes; here rows go through the factors instead.
    """
    terms: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    for name, *both, count, scaling in terms_of_experts(experts):
        a, b = (local_tensor(factor) for factor in both)
        factors = (
            a.reshape(count, -1, a.shape[1]),
            b.reshape(b.shape[0], -1, count).permute(2, 0, 1).contiguous(),
        )
        terms.setdefault(name, []).append((*factors, scaling))
    return terms
