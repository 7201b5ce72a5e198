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
    on_device: Tensor | int = 0  # routes to each expert that were counted on the device
    # ``[4]``: dropped routes; the balance loss and the z-loss, each times tokens; real tokens
    numbers: Tensor | None = None
    wanted: Tensor | int = 0  # routes of real tokens to each expert, for the update of its bias

    def __post_init__(self) -> None:
        self.counts = [0] * self.count

    def reset(self) -> None:
        """Set all counts to zero."""
        self.counts = [0] * self.count
        self.on_device, self.wanted, self.numbers = 0, 0, None

    def add(self, counts: Sequence[int] | Tensor) -> None:
        """Add routes to each expert."""
        if isinstance(counts, Tensor):
            self.on_device = self.on_device + counts
        else:
            self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    def add_numbers(self, place: int, *values: Tensor) -> None:
        """Add to ``numbers``, from ``place`` on."""
        if self.numbers is None:
            self.numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=values[0].device)
        self.numbers[place : place + len(values)] += torch.stack([value.detach().double() for value in values])

    def total(self, device: torch.device) -> Tensor:
        """Return all counts but ``wanted`` as ``[experts + 4]``."""
        counts = torch.tensor(self.counts, dtype=torch.float64, device=device) + self.on_device
        return torch.cat((counts, counts.new_zeros(NUMBERS) if self.numbers is None else self.numbers))
