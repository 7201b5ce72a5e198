"""How many tokens each expert gets: counted while a model runs, added up over ranks when somebody asks.

Counting asks the device nothing: what the exchange of tokens knows on the host is added up there, the rest stays on the
device until :func:`expert_load`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._host.transformers.classes import class_name
from ...errors import ConfigError
from ...runtime import runtime_of
from .balance import max_over_mean, normalized_entropy

_NUMBERS = 4  # beside the counts of a layer: dropped, balance, z, tokens


@dataclass
class LayerCounter:
    """What one rank has counted in one layer; of what several ranks know alike, one of them counts.

    Attributes:
        counts: routes to each expert, known on the host.
        on_device: the same, on the device.
        numbers: ``[4]``: dropped routes; the balance loss and the z-loss, each times tokens; real tokens.
        wanted: routes of real tokens to each expert, for the update of its bias.
    """

    count: int
    counts: list[int] = field(default_factory=list)
    on_device: Tensor | None = None
    numbers: Tensor | None = None
    wanted: Tensor | None = None

    def reset(self) -> None:
        """Begin anew."""
        self.counts = [0] * self.count
        self.on_device = self.numbers = self.wanted = None

    def add(self, counts: Sequence[int] | Tensor) -> None:
        """Add routes to each expert."""
        if isinstance(counts, Tensor):
            self.on_device = counts if self.on_device is None else self.on_device + counts
        else:
            self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    def add_numbers(self, place: int, *values: Tensor) -> None:
        """Add to ``numbers``, from ``place`` on."""
        if self.numbers is None:
            self.numbers = torch.zeros(_NUMBERS, dtype=torch.float64, device=values[0].device)
        self.numbers[place : place + len(values)] += torch.stack([value.detach().double() for value in values])

    def add_wanted(self, counts: Tensor) -> None:
        """Add to ``wanted``."""
        self.wanted = counts if self.wanted is None else self.wanted + counts

    def total(self, device: torch.device) -> Tensor:
        """``[experts + 4]``: everything but ``wanted``."""
        counts = torch.tensor(self.counts, dtype=torch.float64, device=device)
        if self.on_device is not None:
            counts = counts + self.on_device
        return torch.cat((counts, counts.new_zeros(_NUMBERS) if self.numbers is None else self.numbers))


class Counters:
    """Those of all layers that a rank holds, by the name of the experts' module."""

    def __init__(self) -> None:
        self.layers: dict[str, LayerCounter] = {}
        self.asked = False

    def layer(self, name: str, count: int) -> LayerCounter:
        """A new one."""
        self.layers[name] = counter = LayerCounter(count)
        counter.reset()
        return counter

    def begin(self) -> None:
        """Forget what was counted."""
        self.asked = False
        for counter in self.layers.values():
            counter.reset()

    def begin_if_asked(self) -> None:
        """In loops of one's own, a count goes on until somebody asks for it."""
        if self.asked:
            self.begin()


@dataclass(frozen=True)
class LayerLoad:
    """The load of one layer's experts.

    Attributes:
        name: the module that holds them.
        tokens: how many tokens each expert computed, padding included, as the device does.
        dropped: routes of real tokens that found no room.
        balance_loss: without its coefficient; 1 at balance, 0 where it is not asked for.
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
    """The load of all layers, in the model's order."""

    layers: tuple[LayerLoad, ...]

    def metrics(self, prefix: str = "experts/") -> dict[str, float]:
        """A few numbers for a log: the worst layer's, and means over layers."""
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
    """Tokens per expert in the last step, over all ranks; the same on every rank, each of which calls it.

    In loops of one's own: in all passes since it was last called. Recomputation counts once.

    Raises:
        ConfigError: nothing counts in this model.
    """
    runtime = runtime_of(model)
    if runtime.routing is None:
        raise ConfigError(
            "nothing counts tokens in this model: give it routing=hfscale.RoutingConfig() when it is loaded"
            if runtime.plan.mixtures
            else f"{class_name(runtime.model)} has no experts that hfscale knows, so there is no load of theirs"
        )
    counters, mesh = runtime.routing.counters, runtime.mesh
    rows = []
    for planned in runtime.plan.mixtures:
        counter = counters.layers.get(planned.name)
        empty = torch.zeros(planned.count + _NUMBERS, dtype=torch.float64, device=mesh.device)
        rows.append(empty if counter is None else counter.total(mesh.device))
    flat = torch.cat(rows)
    for group in (*mesh.batch_groups, *mesh.groups("tp", "pp")):
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
