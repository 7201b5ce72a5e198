"""Choose the experts of one MoE layer's tokens after its router has run, and add router losses after its experts.

::

    router --logits--> .          ``choose`` keeps the model's own choice, or replaces it
      |                |
      +--index, weights--> choose --> capacity --> experts --> finish --> out
                              |                                ^
                              +---- this layer's router loss --+    its gradient is added here in the backward pass
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.replaced import attribute_replaced
from ...config.routing import RoutingConfig
from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import all_gather, reduce_from_tp_region
from ...distributed.ops.vocab_cross_entropy import gathered
from ...errors import ConfigError
from ...plan import ExpertsPlan
from ...plan.cut import share_evenly
from ...train.runtime import recomputing
from . import router_functions
from .choice_bias import ChoiceBias
from .forward_contexts import ForwardContexts, Pass, attach, real_tokens

NUMBERS = 4  # statistics of a layer in addition to its counts: dropped routes, balance loss, z-loss, tokens


@dataclass(frozen=True)
class Choice:
    """Hold the experts that are chosen for a layer's tokens, and their weights."""

    index: Tensor  # ``[n, k]``, the experts; the number of experts for a dropped route
    weights: Tensor  # ``[n, k]``
    # ``[n, k]``, the slot of each route in buffers of fixed capacity (:mod:`.mixture`), else ``None``
    places: Tensor | None = None
    slots: Sequence[int] = ()  # how many slots each rank has at each expert
    loss: Tensor | None = None  # this layer's router loss


class RouterLogits:
    """Record the logits of the latest call of a router, by a hook."""

    def __init__(self, router: nn.Module, place: int) -> None:
        self._place = place
        self._latest: Tensor | None = None
        router.register_forward_hook(self._keep)

    def _keep(
        self,
        router: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        self._latest = output if isinstance(output, Tensor) else output[self._place]

    def take(self, n: int, count: int, name: str) -> Tensor:
        """Return the recorded router logits as ``[n, experts]``, and drop the record."""
        logits = self._latest
        self._latest = None
        if logits is None or logits.shape[-1] != count or logits.numel() != n * count:
            raise ConfigError(
                f"{name}: routing= needs the router's logits of {n} tokens for {count} experts, but got "
                f"{'none' if logits is None else tuple(logits.shape)}: use router='model' without balance_loss and "
                "z_loss, which needs no logits"
            )
        return logits.reshape(n, count)


class Routing:
    """Hold what all MoE layers of a model need for routing: the options, the counters of tokens per expert, and the
    biases to update.
    """

    def __init__(self, mesh: Mesh, options: RoutingConfig) -> None:
        self.options = options
        self.mesh = mesh
        # Whether the counts were read. Without ``train_step``, counts accumulate until they are read.
        self.asked = False
        # contexts of the model's forward passes; ``None`` if no layer needs them
        self.passes = ForwardContexts(options.draws) if options.needs_tokens else None
        # name of the experts' module -> the layer's counter of tokens per expert, and the router bias to update
        self.counters: dict[str, LayerCounter] = {}
        self.biases: dict[str, ChoiceBias] = {}

    def count_anew(self) -> None:
        """Set the counters of tokens per expert to zero, in all layers."""
        self.asked = False
        for counter in self.counters.values():
            counter.reset()

    @contextmanager
    def step(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        train: bool,
    ) -> Iterator[None]:
        """Prepare one step over this rank's ``microbatches``, whose forward passes run inside the with block. Update
        the routers' biases at the end of the block if ``train``.
        """
        self.count_anew()
        if self.passes is None:
            yield
            return
        real = None
        if self.options.has_loss:
            real = torch.stack([real_tokens(microbatch).sum() for microbatch in microbatches]).sum()
            for group in self.mesh.loss_groups:
                dist.all_reduce(real, group=group)
        with attribute_replaced(self.passes, "tokens", real):
            yield
        if train and self.biases:
            self._move_biases()

    def note_scale(self, scale: float) -> None:
        """Set the factor on the loss for the router losses of the latest pass. A pipeline stage without the model's
        loss calls this, since its router losses get no gradient from the loss.
        """
        if self.passes is not None and self.passes.latest.loss is not None:
            self.passes.latest.scale = scale

    @torch.no_grad()
    def _move_biases(self) -> None:
        """Update the router biases from the expert loads of all batches, equally on every rank that has the layer."""
        counters = [self.counters[name] for name in self.biases]
        device = self.mesh.device
        flat = torch.cat(
            [
                torch.zeros(
                    c.count,
                    dtype=torch.int64,
                    device=device,
                )
                + c.wanted
                for c in counters
            ]
        )
        for group in (*self.mesh.loss_groups, *self.mesh.groups("tp")):
            dist.all_reduce(flat, group=group)
        loads = flat.split([counter.count for counter in counters])
        for bias, counts in zip(self.biases.values(), loads, strict=True):
            bias.move(router_functions.bias_step(counts, self.options.bias_update_rate))


@dataclass
class LayerRouting:
    """Choose the experts of one layer's tokens, drop tokens beyond an expert's capacity, and count the tokens of each
    expert.
    """

    planned: ExpertsPlan
    number: int  # the layer's index among the model's MoE layers
    routing: Routing
    is_cut: Callable[[], bool]  # whether this tensor rank has only a shard of the tokens
    # Records the router's logits; ``None`` if they are not needed.
    logits: RouterLogits | None = None
    # ``"softmax"`` or ``"sigmoid"``, which converts logits to probabilities
    scores: str = "softmax"
    # Factor of the router loss's gradient: 1 / tp if tensor ranks have the same tokens and sum their router gradients.
    times: float = 1.0

    def __post_init__(self) -> None:
        self.options = self.routing.options
        self.passes = self.routing.passes
        self.mesh = self.routing.mesh
        # If all tensor ranks have the same tokens, only the first tensor rank counts them.
        self.is_first = self.mesh.tp_rank == 0
        # Whether limited capacity uses buffers of fixed size.
        self.fixed = not self.mesh.layout.slices_tokens
        self.counter = self.routing.counters[self.planned.name] = LayerCounter(self.planned.count)

    def choose(self, index: Tensor, weights: Tensor) -> Choice:
        """Return the experts and weights that ``n`` tokens use, given those that the stock router has chosen: ``index
        [n, k]`` and ``weights [n, k]``.
        """
        if self.routing.asked and not recomputing():
            self.routing.count_anew()
        if self.passes is not None:
            return self._choose(self.passes.current(), index, weights)
        if self.options.force_balanced:
            index = router_functions.round_robin(index, self.planned.count)
        return Choice(index, weights)

    def finish(self, out: Tensor, choice: Choice) -> Tensor:
        """Return the experts' output ``out``; its backward pass also computes the gradient of this layer's router
        loss.
        """
        if choice.loss is None or self.passes is None:
            return out
        return attach(
            out,
            choice.loss,
            self.passes.current(),
            1.0 if self.is_cut() else self.times,
        )

    def count(self, counts: Sequence[int] | Tensor) -> None:
        """Add to the layer's counts how many tokens this rank sent to each expert."""
        if not recomputing() and (self.mesh.layout.slices_tokens or self.is_first):
            self.counter.add(counts)

    def _choose(self, now: Pass, index: Tensor, weights: Tensor) -> Choice:
        options = self.options
        own = self._own_tokens(now, index.shape[0])
        counts = not recomputing() and (bool(own.lengths) or self.is_first)
        logits = (
            None
            if self.logits is None
            else self.logits.take(len(index), self.planned.count, self.planned.name)
        )
        if options.router != "model":
            assert logits is not None
            index, new = self._rerouted(logits, index.shape[1], now, own)
            weights = new.to(weights.dtype)
        by_sample = index.view(*own.real.shape, index.shape[1])
        loss = None
        if options.has_loss:
            assert logits is not None
            by_token = logits.view(*own.real.shape, self.planned.count)
            loss = self._loss(
                now, router_functions.expert_sums(by_token, by_sample, own.real, self.scores)
            )
        if options.bias_update_rate and counts:
            wanted = router_functions.expert_counts(by_sample, self.planned.count, own.real)
            self.counter.wanted = self.counter.wanted + wanted.sum(0)
        if options.force_balanced:
            index = router_functions.round_robin(index, self.planned.count)
        choice = Choice(index, weights, loss=loss)
        return (
            choice
            if options.capacity is None
            else self._limited(choice, options.capacity, now, own, counts)
        )

    def _limited(
        self, choice: Choice, capacity: float, now: Pass, own: "_OwnTokens", counts: bool
    ) -> Choice:
        """Drop the assignments of tokens to experts that exceed the experts' capacity."""
        count = self.planned.count
        index = choice.index.view(*own.real.shape, choice.index.shape[1])
        kept, places = self._routes_within_capacity(capacity, index, now, own)
        if counts:
            self.counter.add_numbers(
                0,
                (own.real.unsqueeze(-1) & (index < count) & ~kept).sum(),
            )
        index = index.where(kept, count)
        if not self.fixed:
            return replace(choice, index=index.flatten(0, 1))
        k = index.shape[2]
        slots = [
            samples * router_functions.room(tokens, capacity, k, count)
            for samples, tokens in self._shapes(now)
        ]
        each = router_functions.room(index.shape[1], capacity, k, count)
        mine = len(index) * each  # this rank's slots at each expert
        sample = torch.arange(len(index), device=index.device).view(-1, 1, 1)
        places = (index * mine + sample * each + places).where(kept, count * mine)
        return replace(
            choice,
            index=index.flatten(0, 1),
            places=places.flatten(0, 1),
            slots=slots,
        )

    def _own_tokens(self, now: Pass, rows: int) -> "_OwnTokens":
        """Return which tokens of the batch this rank has. Raise :class:`ConfigError` if ``rows``, the number of tokens
        that the experts got, is another number.
        """
        (samples, tokens), rank = now.real.shape, self.mesh.tp_rank
        lengths = share_evenly(tokens, self.mesh.layout.tp) if self.is_cut() else []
        start, own = (sum(lengths[:rank]), lengths[rank]) if lengths else (0, tokens)
        if rows != samples * own:
            raise ConfigError(
                f"{self.planned.name} must be called with all tokens that this rank has ({samples * own}, of a batch "
                f"of {samples} x {tokens}), got {rows} tokens: use RoutingConfig() (which only counts tokens) or "
                f"force_balanced alone, because other options of routing= need all tokens in {self.planned.name!r}"
            )
        return _OwnTokens(lengths, start, now.real.narrow(1, start, own))

    def _rerouted(
        self, logits: Tensor, k: int, now: Pass, own: "_OwnTokens"
    ) -> tuple[Tensor, Tensor]:
        """Return each token's experts (``index``) and their weights, chosen by the router that the options name.

        For routers with random numbers, every tensor rank draws the same numbers for all tokens, and uses the numbers
        of its own tokens.
        """
        options, (samples, tokens) = self.options, now.real.shape
        if options.router == "switch":
            return router_functions.switch(logits)
        draws = noise = None
        if now.seed is not None:
            generator = torch.Generator(logits.device).manual_seed(now.seed * 4096 + self.number)
            if options.router == "gshard":
                draws = own.take_rows(
                    torch.rand(samples, tokens, generator=generator, device=logits.device)
                ).flatten()
            else:
                count = self.planned.count
                std = 1 / count if options.noise_std is None else options.noise_std
                noise = torch.randn(
                    samples, tokens, count, generator=generator, device=logits.device
                )
                noise = own.take_rows(noise).flatten(0, 1) * std
        if options.router == "gshard":
            return router_functions.gshard(logits, draws)
        return router_functions.noisy_topk(logits, k, noise)

    def _loss(self, now: Pass, sums: Tensor) -> Tensor:
        """Return this layer's router loss: the balance loss and the z-loss, weighted, per token of the step."""
        if self.is_cut():
            sums = reduce_from_tp_region(sums, self.mesh.tp_group)
        # Each context rank has some tokens of every sequence.
        sums = reduce_from_tp_region(sums, self.mesh.context)
        balance = router_functions.balance_loss(sums)
        z = router_functions.z_loss(sums)
        loss = (self.options.balance_loss * balance + self.options.z_loss * z) / now.tokens
        if not recomputing():
            now.add(loss)
            if self.is_first:
                once = self.mesh.speaks_for_sequences
                self.counter.add_numbers(1, balance * once, z * once, now.real.sum())
        return loss

    def _routes_within_capacity(
        self, factor: float, index: Tensor, now: Pass, own: "_OwnTokens"
    ) -> tuple[Tensor, Tensor]:
        """Return, for each token and each of its ``k`` experts, whether the expert's capacity suffices, and how many
        tokens precede the token at this expert. Both are ``[b, s, k]``.

        Precedence is counted over the tokens of all tensor ranks.
        """
        count = self.planned.count
        whole = index.where(own.real.unsqueeze(-1), count)  # padding uses no capacity
        group = self.mesh.tp_group
        if own.lengths and group is not None:
            whole = all_gather(whole, own.lengths, 1, group)
        limits = router_functions.room(
            now.real.sum(1),
            factor,
            index.shape[2],
            count,
        ).view(-1, 1, 1)
        places = router_functions.queue_places(whole, count)
        kept = (places < limits) & (whole < count)
        return own.take_rows(kept), own.take_rows(places)

    def _shapes(self, now: Pass) -> list[tuple[int, int]]:
        """Return, for each rank that sends tokens to this rank's experts, the batch size and the number of tokens per
        sequence.

        Ranks exchange these numbers once per forward pass.
        """
        group = self.mesh.expert_reports
        if not now.shapes and group is not None:  # on the host, without a device synchronization
            every = gathered(torch.tensor(now.real.shape), group)
            now.shapes = [(samples, tokens) for samples, tokens in every.tolist()]
        return now.shapes or [(now.real.shape[0], now.real.shape[1])]


@dataclass(frozen=True)
class _OwnTokens:
    """Describe which tokens of a forward pass a tensor rank has."""

    # tokens per sequence on each tensor rank; empty if every rank has all tokens
    lengths: list[int]
    start: int  # the position of this rank's first token in each sequence
    real: Tensor  # ``[b, s]``, true for this rank's tokens that are not padding

    def take_rows(self, whole: Tensor) -> Tensor:
        """Return the entries of this rank's tokens in ``whole [b, s, ...]``, a tensor of all tokens."""
        return whole.narrow(1, self.start, self.real.shape[1])


@dataclass
class LayerCounter:
    """Count, on one rank and without a device synchronization, the tokens that one layer sends to each expert.

    If several ranks would count the same tokens, only one of them counts.
    """

    count: int  # number of experts
    # ``[experts]``: routes to each expert, on the CPU or on the device
    counts: Tensor | int = 0
    # ``[4]``: dropped routes; the balance loss and the z-loss, each times tokens; tokens without padding
    numbers: Tensor | None = None
    # ``[experts]``: routes of tokens without padding, for the update of the router's bias
    wanted: Tensor | int = 0

    def reset(self) -> None:
        """Set all counts to zero."""
        self.counts = 0
        self.wanted = 0
        self.numbers = None

    def add(self, counts: Sequence[int] | Tensor) -> None:
        """Add ``counts [experts]``, the numbers of tokens sent to each expert, to the layer's counts."""
        self.counts = self.counts + torch.as_tensor(counts)

    def add_numbers(self, place: int, *values: Tensor) -> None:
        """Add ``values`` to the layer's statistics (dropped tokens, balance loss, z-loss, tokens without padding), from
        index ``place`` on.
        """
        if self.numbers is None:
            self.numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=values[0].device)
        self.numbers[place : place + len(values)] += torch.stack(
            [value.detach().double() for value in values]
        )

    def total(self, device: torch.device) -> Tensor:
        """Return the tokens of each expert and the layer's four statistics as one tensor ``[experts + 4]``."""
        given = torch.as_tensor(self.counts).to(device, non_blocking=True)
        counts = torch.zeros(self.count, dtype=torch.float64, device=device) + given
        return torch.cat(
            (counts, counts.new_zeros(NUMBERS) if self.numbers is None else self.numbers)
        )
