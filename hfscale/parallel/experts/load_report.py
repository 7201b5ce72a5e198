"""Report the load of experts, summed over ranks: see :mod:`.token_counts`."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..._compat.transformers.classes import class_name
from ...errors import ConfigError
from ...train.runtime import runtime_of
from .balance import max_over_mean, normalized_entropy
from .part import ExpertRouting
from .token_counts import NUMBERS


@dataclass(frozen=True)
class LayerLoad:
    """Report the load of one layer's experts.

    Attributes:
        name: the module that holds them.
        tokens: how many tokens each expert computed, padding included.
        dropped: routes of real tokens that were dropped for capacity.
        balance_loss: without its coefficient; 1 at balance, 0 where it is off.
        z_loss: likewise.
    """

    name: str
    tokens: tuple[int, ...]
    dropped: int = 0
    balance_loss: float = 0.0
    z_loss: float = 0.0

    @property
    def max_over_mean(self) -> float:
        """The largest load over the mean: 1 where they are even."""
        return max_over_mean(self.tokens)

    @property
    def entropy(self) -> float:
        """Entropy of the loads over that of even ones, 0 to 1."""
        return normalized_entropy(self.tokens)

    @property
    def dropped_share(self) -> float:
        """Dropped routes over all routes."""
        return self.dropped / max(1, self.dropped + sum(self.tokens))


@dataclass(frozen=True)
class ExpertLoad:
    """Report the load of all layers' experts, in the model's order."""

    layers: tuple[LayerLoad, ...]

    def metrics(self, prefix: str = "experts/") -> dict[str, float]:
        """Return numbers to log: the worst layer's balance, and means over layers."""
        dropped = sum(layer.dropped for layer in self.layers)
        routes = dropped + sum(sum(layer.tokens) for layer in self.layers)
        found = {
            "max_over_mean": max(layer.max_over_mean for layer in self.layers),
            "entropy": min(layer.entropy for layer in self.layers),
            "dropped": dropped / max(1, routes),
            "balance_loss": sum(layer.balance_loss for layer in self.layers) / len(self.layers),
            "z_loss": sum(layer.z_loss for layer in self.layers) / len(self.layers),
        }
        return {f"{prefix}{name}": value for name, value in found.items()}


@torch.no_grad()
def expert_load(model: nn.Module) -> ExpertLoad:
    """Return the tokens per expert in the last step, summed over all ranks; call it on every rank.

    In loops of one's own: in all passes since it was last called. Recomputation counts once.

    Raises:
        ConfigError: nothing counts in this model.
    """
    runtime = runtime_of(model)
    part = runtime.part(ExpertRouting)
    if part is None or part.routing is None:
        raise ConfigError(
            "tokens are not counted in this model: load it with routing=hfscale.RoutingConfig()"
            if runtime.plan.mixtures
            else f"{class_name(runtime.model)} has no experts that hfscale knows, so it has no expert load"
        )
    counters, mesh = part.routing.counters, runtime.mesh
    rows = []
    for planned in runtime.plan.mixtures:
        counter = counters.layers.get(planned.name)
        empty = torch.zeros(planned.count + NUMBERS, dtype=torch.float64, device=mesh.device)
        rows.append(empty if counter is None else counter.total(mesh.device))
    flat = torch.cat(rows)
    for group in (*mesh.loss_groups, *mesh.groups("tp", "pp")):
        dist.all_reduce(flat, group=group)
    counters.asked = True
    layers = []
    for planned, row in zip(runtime.plan.mixtures, flat.split([len(row) for row in rows]), strict=True):
        values = row.tolist()
        dropped, balance, z, tokens = values[planned.count :]
        layers.append(
            LayerLoad(
                planned.name,
                tuple(round(value) for value in values[: planned.count]),
                round(dropped),
                balance / max(1.0, tokens),
                z / max(1.0, tokens),
            )
        )
    return ExpertLoad(tuple(layers))
