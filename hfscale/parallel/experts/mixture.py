"""Replace the forward of a stock module of experts by one that exchanges tokens with other ranks.

The stock MoE block around the experts is unchanged: it calls its router, then ``experts(hidden, index, weights)`` with
indices of *all* experts, and receives the weighted sums for its tokens. If tensor ranks have the same batch and each
has whole experts, every tensor rank sends a shard of the tokens, so that no token is computed twice. Under sequence
parallelism a tensor rank has only its shard of the tokens anyway.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.peft import terms_of_experts
from ..._compat.transformers.experts import apply_gate, runs_grouped_products
from ...config.routing import RoutingConfig
from ...distributed.ops import collectives
from ...distributed.ops.grouped_linear import (
    ALIGNED,
    add_biases,
    frozen_grouped_linear,
    grouped_linear,
)
from ...distributed.ops.quantized_weights import encodings_of, read_quantized
from ...distributed.ops.shared_casts import autocast_dtype, cast_weight
from ...plan.cut import share_evenly
from ...train.runtime import Runtime, local_tensor
from ...train.runtime.parameter_names import unwrapped
from .dispatch import Routes, combine, dispatch, plan_routes
from .expert_routing import routing_of_layers
from .layer import LayerRouting, Routing
from .router_functions import count_each


class Mixture:
    """Run the experts of one MoE layer, which are distributed over expert ranks.

    The experts of a rank compute tokens of ``batches`` batches, which come from different data ranks. If the layout has
    tensor ranks with the same tokens, each rank of the tensor group ``shares`` sends only its shard of these tokens.
    """

    def __init__(self, routing: LayerRouting, experts: nn.Module) -> None:
        mesh = routing.mesh
        self.experts = experts  # the experts of this rank
        layout = routing.mesh.layout
        self.routing, self.group, self.batches = routing, mesh.group("ep"), layout.expert_batches
        self.shares = mesh.tp_group if layout.slices_tokens else None
        self.count = routing.planned.count

    def run(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return ``[n, h]``, the result of the stock ``experts(hidden [n, h], index [n, k], weights [n, k])``, by
        sending tokens to the ranks of their experts.
        """
        choice = self.routing.choose(index, weights)
        if choice.places is None:
            out = self._routed(hidden, choice.index, choice.weights)
        else:
            # Counted on the device, without a synchronization.
            self.routing.count(count_each(choice.index.flatten(), self.count + 1)[:-1])
            out = self._through_slots(hidden, choice.weights, choice.places, choice.slots)
        return self.routing.finish(out, choice)

    def _routed(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Send each tensor rank's shard of the tokens to the experts. If an all-reduce of the experts' outputs sends at
        most as many bytes, run this rank's experts on all tokens and all-reduce their outputs instead.
        """
        if self.shares is None or self.routing.is_cut():
            return self._exchanged(hidden, index, weights)
        if self.batches == 1 and 2 * index.shape[1] >= dist.get_world_size(self.shares):
            return self._run_on_all_tokens(hidden, index, weights, self.shares)
        lengths = share_evenly(hidden.shape[0], dist.get_world_size(self.shares))
        own_index = collectives.own_slice(index, lengths, 0, self.shares)
        own_hidden, own_weights = (
            collectives.scatter_to_tp_region(x, lengths, self.shares, 0) for x in (hidden, weights)
        )
        out = self._exchanged(own_hidden, own_index, own_weights)
        return collectives.gather_from_tp_region(out, lengths, self.shares, 0)

    def _run_on_all_tokens(
        self, hidden: Tensor, index: Tensor, weights: Tensor, ranks: dist.ProcessGroup
    ) -> Tensor:
        """Run this rank's experts on all tokens, and all-reduce the outputs."""
        own = self.count // dist.get_world_size(ranks)
        before = dist.get_rank(ranks) * own
        local = index - before
        local = local.masked_fill((local < 0) | (local >= own), own)
        routes, counts = plan_routes(local, own, None)
        self.routing.count([0] * before + counts + [0] * (self.count - before - own))
        entered, factors = (
            collectives.copy_to_tp_region(x, ranks) for x in (self._cast(hidden), weights)
        )
        out = through_experts(self.experts, entered, factors, routes)
        return collectives.reduce_from_tp_region(out, ranks).to(hidden.dtype)

    def _exchanged(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        routes, counts = plan_routes(index, self.count, self.group)
        self.routing.count(counts)
        cast = self._cast(hidden)
        return through_experts(self.experts, cast, weights, routes, self.batches).to(hidden.dtype)

    def _cast(self, hidden: Tensor) -> Tensor:
        return hidden.to(compute_type(self.experts, hidden))

    def _through_slots(
        self, hidden: Tensor, weights: Tensor, places: Tensor, slots: Sequence[int]
    ) -> Tensor:
        """Send tokens to their experts in buffers of fixed capacity, and return the combined outputs ``[n, h]``.

        Each expert has a fixed number of buffer rows (slots) for each sending rank: rank ``r`` sends ``slots[r]`` rows
        to each expert, whether they are used or not, so that the host never waits for the device. Unused rows are zero
        and have no gradient. :mod:`.dispatch` describes how gradients are scaled by ``batches``.

        Args:
            hidden: ``[n, h]``, this rank's tokens.
            weights: ``[n, k]``, the weights of each token's experts.
            places: ``[n, k]``, the slot of each token at each of its experts, in this rank's buffer:
                ``expert * slots[rank] + place``; ``count * slots[rank]`` if the token is dropped.
            slots: rows per expert that each rank of ``group`` sends.
        """
        ranks = len(slots)
        local = self.count // ranks
        own = slots[0 if self.group is None else dist.get_rank(self.group)]
        width = hidden.shape[-1]
        k = places.shape[1]
        rows = hidden if k == 1 else hidden.repeat_interleave(k, 0)
        # One extra row receives the dropped routes, and is removed.
        empty = hidden.new_zeros(self.count * own + 1, width)
        buffer = empty.index_copy(0, places.flatten(), rows)[:-1]
        send = [local * own] * ranks
        receive = [local * other for other in slots]
        buffer = self._all_to_all(buffer, send, receive, float(self.batches))
        by_sender = [
            part.view(local, other, width)
            for part, other in zip(buffer.split(receive), slots, strict=True)
        ]
        grouped = torch.cat(by_sender, 1).flatten(0, 1)
        out = run_experts(self.experts, grouped, [sum(slots)] * local).view(local, sum(slots), -1)
        leaving = torch.cat([part.flatten(0, 1) for part in out.split(list(slots), 1)])
        leaving = self._all_to_all(leaving, receive, send, 1.0 / self.batches)
        back = torch.cat((leaving, leaving.new_zeros(1, leaving.shape[-1])))
        return (back[places] * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _all_to_all(
        self, rows: Tensor, send: list[int], receive: list[int], factor: float
    ) -> Tensor:
        """Exchange rows by all-to-all; in the backward pass, multiply the gradients by ``factor`` and send them
        back.
        """
        if self.group is None:
            return rows
        return collectives.apply_mapping(
            rows,
            lambda rows: collectives.all_to_all(rows, send, receive, self.group),
            lambda grad: collectives.all_to_all(grad * factor, receive, send, self.group),
        )


def through_experts(
    experts: Any, hidden: Tensor, weights: Tensor, routes: Routes, batches: int = 1
) -> Tensor:
    """Send tokens ``hidden [n, h]`` to their experts on all ranks, and return the sums of the experts' outputs,
    weighted by ``weights [n, k]``.
    """
    grouped = run_experts(experts, dispatch(hidden, routes, batches), routes.counts)
    return combine(grouped, weights, routes, batches)


def install_experts(runtime: Runtime, options: RoutingConfig | None) -> Routing | None:
    """Make the expert modules of the model exchange tokens with other ranks; return the routing state that they have in
    common.

    Modules are left stock, and ``None`` is returned, if hfscale does not have to replace them. It has to if there are
    several expert ranks or ``options``, if experts are quantized or have adapters, if the sizes of their shards are
    rejected by torch's grouped matmul, or if autocast copies of weights are kept for several microbatches.

    Call this before tensor parallelism is installed, whose hooks may replace parameters of experts.
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
    # Whether autocast copies of weights are kept; the stock forward would make a copy for each microbatch.
    copies = bool(modules) and runtime.shares_casts
    if mesh.group("ep") is None and options is None and not (changed or narrow or copies):
        return None
    routing, layers = routing_of_layers(runtime, options)
    for layer in layers:
        module: Any = runtime.model.get_submodule(layer.planned.name)
        module.forward = Mixture(layer, module).run
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


def compute_type(experts: Any, x: Tensor) -> torch.dtype:
    """Return the dtype in which the transformers module ``experts`` computes ``x``, autocast included."""
    experts = unwrapped(experts)
    weight: Tensor = experts.down_proj
    encoding = encodings_of(experts).get("down_proj")
    if encoding is None or torch.is_autocast_enabled(weight.device.type):
        return autocast_dtype(weight)
    return encoding.compute_dtype or x.dtype


def run_experts(experts: Any, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute a stock module of experts on ``x [rows, h]``, sorted by expert, with ``counts[i]`` rows for expert ``i``.
    Parameters are read from the module on each call, since tensor parallelism may replace them.
    """
    dtype = compute_type(experts, x)
    added, experts = low_rank_terms(experts), unwrapped(experts)
    transposed = experts.is_transposed

    def linear(x: Tensor, name: str) -> Tensor:
        out = whole_rank(x, name)
        for a, b, scaling in added.get(name, ()):
            inner = grouped_linear(x, a.to(dtype), counts)
            out = out + scaling * grouped_linear(inner, b.to(dtype), counts)
        return out

    def whole_rank(x: Tensor, name: str) -> Tensor:
        if name in encodings_of(experts):
            # Dequantized in the forward pass and again in the backward pass (QLoRA, Dettmers et al. 2023).
            out = frozen_grouped_linear(
                x,
                lambda dtype: read_quantized(experts, name).to(dtype),
                counts,
                transposed=transposed,
            )
        else:
            weight = cast_weight(local_tensor(getattr(experts, name)), dtype)
            out = grouped_linear(x, weight, counts, transposed=transposed)
        if not experts.has_bias:
            return out
        return add_biases(out, local_tensor(getattr(experts, f"{name}_bias")).to(dtype), counts)

    if experts.has_gate:
        inner = apply_gate(experts, linear(x.to(dtype), "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(x.to(dtype), "up_proj"))
    out = linear(inner, "down_proj")
    return experts.post_expert_norm(out) if getattr(experts, "has_post_expert_norm", False) else out


def low_rank_terms(experts: Any) -> dict[str, list[tuple[Tensor, Tensor, float]]]:
    """Return, for each expert parameter, its LoRA factors ``A [e, r, in]``, ``B [e, out, r]`` and their scale. PEFT
    adds ``B A`` to the weights of all experts and then computes; hfscale multiplies rows by ``A`` and ``B`` instead.
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
