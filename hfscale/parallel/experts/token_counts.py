"""Count the tokens of each expert while a model runs; ranks are summed on request.

Counting never synchronizes with the device: counts that the token exchange has on the host are added there, the rest
stays on the device until :func:`expert_load`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

NUMBERS = 4  # beside the counts of a layer: dropped, balance, z, tokens


@dataclass
class LayerCounter:
    """Count the tokens of one layer on one rank; counts known to several ranks are kept by one of them."""

    count: int
    counts: list[int] = field(init=False)  # routes to each expert that were counted on the host
    on_device: Tensor | None = None  # routes to each expert that were counted on the device
    # ``[4]``: dropped routes; the balance loss and the z-loss, each times tokens; real tokens
    numbers: Tensor | None = None
    wanted: Tensor | None = None  # routes of real tokens to each expert, for the update of its bias

    def __post_init__(self) -> None:
        self.counts = [0] * self.count

    def reset(self) -> None:
        """Set all counts to zero."""
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
            self.numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=values[0].device)
        self.numbers[place : place + len(values)] += torch.stack([value.detach().double() for value in values])

    def add_wanted(self, counts: Tensor) -> None:
        """Add a value to ``wanted``."""
        self.wanted = counts if self.wanted is None else self.wanted + counts

    def wanted_on(self, device: torch.device) -> Tensor:
        """Return ``wanted``, zeros if nothing was added."""
        return torch.zeros(self.count, dtype=torch.int64, device=device) if self.wanted is None else self.wanted

    def total(self, device: torch.device) -> Tensor:
        """Return all counts but ``wanted`` as ``[experts + 4]``."""
        counts = torch.tensor(self.counts, dtype=torch.float64, device=device)
        if self.on_device is not None:
            counts = counts + self.on_device
        return torch.cat((counts, counts.new_zeros(NUMBERS) if self.numbers is None else self.numbers))
