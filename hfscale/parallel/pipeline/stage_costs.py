"""Count the FLOPs and parameters of a model's layers and other modules from shapes on the meta device, without weights
or a run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from ...models.fields import HEAD_FIELDS, first_count, text_config
from ...models.module_kinds import EXPERT_FIELDS, experts_per_token, has_one_per_expert
from ...plan.stages import balance

# assumed tokens of one optimizer step in one pipeline: eight microbatches of 4096 tokens
_BATCH_TOKENS = 1 << 15
_SEQUENCE = 2048  # assumed length of the sequences over which attention is computed

# The optimizer's cost of a parameter, in FLOPs. AdamW in 32 bits reads the weight, the gradient and two moments, and
# writes the weight and the moments: 28 bytes. While an accelerator moves one byte it computes about 300 FLOPs (H100:
# 989 TFLOP/s in bf16, 3.35 TB/s).
_UPDATE = 28 * 300
# a step has three times the FLOPs of a forward pass: the backward pass has twice as many
_BACKWARD = 3


@dataclass(frozen=True)
class Cost:
    """Hold the FLOPs per token, and the number of parameters, of one or more modules of a model."""

    flops: int = 0  # FLOPs of the part's forward pass per token; a multiplication and an addition count as two
    parameters: int = 0  # the number of the part's parameters

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.parameters + other.parameters)

    def work(self, batch_tokens: int = _BATCH_TOKENS) -> int:
        """Return the cost of the modules in a training step as one number, in FLOPs: those of the passes, plus the
        FLOPs that would take as long as the optimizer's update.
        """
        return _BACKWARD * self.flops * batch_tokens + _UPDATE * self.parameters


@dataclass(frozen=True)
class LayerCosts:
    """Hold the cost (FLOPs, parameters) of each layer of a model, of the modules before and after the layers, and of
    the modules on every stage.
    """

    before: Cost  # modules before the first layer
    layers: tuple[Cost, ...]  # each layer
    after: Cost  # modules after the last layer
    shared: Cost = Cost()  # modules that every stage holds

    def balanced(self, stages: int, first: int = 0) -> tuple[int, ...]:
        """Return how many layers each stage gets, so that stages have similar costs
        (:func:`hfscale.plan.stages.balance`).

        The first stage gets at least ``first`` layers.
        """
        works = [layer.work() for layer in self.layers]
        before = self.before.work()
        after = self.after.work()
        counts = balance(works, stages, before, after)
        return (
            counts
            if counts[0] >= first
            else (
                first,
                *balance(works[first:], stages - 1, 0, after),
            )
        )

    def of_stages(self, counts: Sequence[int]) -> tuple[Cost, ...]:
        """Return the cost of each stage, given the stages' numbers of layers."""
        ends = [0, *accumulate(counts)]
        costs = [sum(self.layers[start:stop], self.shared) for start, stop in pairwise(ends)]
        costs[0] += self.before
        costs[-1] += self.after
        return tuple(costs)


def layer_costs(
    model: Any,
    layers: Sequence[str],
    before: Iterable[str] = (),
    after: Iterable[str] = (),
    shared: Iterable[str] = (),
    *,
    sequence: int = _SEQUENCE,
    beside: Mapping[str, Sequence[str]] | None = None,
) -> LayerCosts:
    """Return the costs of a stock model's layers, and of the modules or parameters around the layers.

    Args:
        model: the stock model.
        layers: names of the layers.
        before: names of modules and parameters before the first layer.
        after: names of modules and parameters after the last layer.
        shared: names of modules and parameters that every stage holds.
        sequence: length of a sequence, with which attention's FLOPs grow.
        beside: layer -> names of modules and parameters that are on the layer's stage.
    """
    around = beside or {}

    def cost(names: Iterable[str]) -> Cost:
        return sum((_named_cost(model, name, sequence) for name in names), Cost())

    of_layers = tuple(
        cost(
            [
                layer,
                *around.get(layer, ()),
            ]
        )
        for layer in layers
    )
    return LayerCosts(cost(before), of_layers, cost(after), cost(shared))


def _named_cost(model: Any, name: str, sequence: int) -> Cost:
    """Return the cost of one module, with its submodules, or of one parameter.

    - Projections (Linear, Conv1D, matrices of experts, routers, short convolutions) count 2 FLOPs per parameter and
      token. For experts this is multiplied by the fraction of the experts that a token is sent to.
    - Embedding lookups count 0.
    - Attention scores and values count ``2 s (d_qk + d_v)`` per head and token over a sequence, or window, of ``s``
      tokens; the half that a causal mask removes is not deducted.
    - Elementwise operations and the recurrences of state-space layers are left out: compared with the projections they
      are small.
    """
    owner, _, child = name.rpartition(".")
    holder = getattr(model.get_submodule(owner), child) if name else model
    if not isinstance(holder, nn.Module):
        return Cost(0, holder.numel())
    sizes = {id(p): p.numel() for p in holder.parameters()}
    return Cost(
        _flops(holder, text_config(model.config), sequence, (1, 1)),
        sum(sizes.values()),
    )


def _flops(
    module: nn.Module,
    config: Any,
    sequence: int,
    share: tuple[int, int],
) -> int:
    experts = first_count(config, EXPERT_FIELDS) or 0
    active = (min(experts_per_token(config) or experts, experts), experts)
    own = list(module.parameters(recurse=False))
    if experts > 1 and share == (1, 1) and has_one_per_expert(module, experts):
        share = active
    flops = 0
    if not isinstance(module, nn.Embedding):
        flops = sum(
            2 * parameter.numel() * share[0] // share[1] for parameter in own if parameter.ndim > 1
        )
    # The innermost module with "Attention" in its class name computes attention.
    if [inner for inner in module.modules() if "Attention" in type(inner).__name__] == [module]:
        flops += _attention(module, config, sequence)
    return flops + sum(_flops(child, config, sequence, share) for child in module.children())


def _attention(module: Any, config: Any, sequence: int) -> int:
    heads = first_count(module, HEAD_FIELDS) or first_count(config, HEAD_FIELDS) or 0
    hidden = first_count(config, ("hidden_size",)) or 0
    head_dim = (
        first_count(module, ("head_dim",))
        or first_count(config, ("head_dim",))
        or hidden // max(1, heads)
    )
    widths = (first_count(module, (name,)) or head_dim for name in ("qk_head_dim", "v_head_dim"))
    window = first_count(module, ("sliding_window", "window_size"))
    return 2 * min(sequence, window or sequence) * heads * sum(widths)
