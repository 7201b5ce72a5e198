"""Make experts start different: noise, and partial re-initialization.

Drop-Upcycling (Nakamura et al. 2025, "Drop-Upcycling: Training Sparse Mixture of Experts with Partial
Re-initialization") redraws a fraction of an expert's hidden channels, with the mean and standard deviation of the
weights that they replace. A channel is a row of ``gate``, the same row of ``up`` and the same column of ``down``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import check_count, check_number
from ...train.runtime.initialize import seed_of
from .moe_targets import INTERMEDIATE_DIM


@dataclass(frozen=True)
class Variation:
    """How experts differ from the dense MLP.

    Attributes:
        noise: standard deviation of the noise on each weight, relative to that of the weight's matrix.
        reinitialize: fraction of the channels that are redrawn, different ones in each expert.
        seed: of both, and of the router.

    Raises:
        ConfigError: a value is impossible.
    """

    noise: float = 0.0
    reinitialize: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("noise", self.noise, least=0)
        check_number("reinitialize", self.reinitialize, least=0, most=1)
        check_count("seed", self.seed, least=0)

    def generator(self, name: str) -> torch.Generator:
        """Return a separate RNG for each name, so that no value depends on the order of draws."""
        return torch.Generator().manual_seed(seed_of(self.seed, name))

    def channels(self, width: int, layer: int, expert: int) -> Tensor:
        """Return the channels of an expert that are redrawn, the same in its three projections."""
        count = round(self.reinitialize * width)
        return torch.randperm(width, generator=self.generator(f"{layer}/{expert}/channels"))[:count]

    def apply(self, weight: Tensor, projection: str, layer: int, expert: int) -> Tensor:
        """Return an expert's weight made from the dense one, which is unchanged; the dense one itself if nothing
        varies.

        Args:
            projection: ``gate``, ``up`` or ``down``.
        """
        if not self.noise and not self.reinitialize:
            return weight
        generator = self.generator(f"{layer}/{expert}/{projection}")
        precise = torch.promote_types(weight.dtype, torch.float32)
        varied = weight.clone()
        if self.noise:
            # Drawn in the weight's own dtype, so that a 16-bit matrix is never held in 32 bits.
            deviation = float(weight.std(correction=0)) * self.noise
            varied += torch.empty_like(weight).normal_(0, deviation, generator=generator)
        dim = INTERMEDIATE_DIM[projection]
        channels = self.channels(weight.shape[dim], layer, expert)
        if len(channels):
            replaced = weight.index_select(dim, channels).to(precise)
            deviation, mean = (float(value) for value in torch.std_mean(replaced, correction=0))
            varied.index_copy_(dim, channels, replaced.normal_(mean, deviation, generator=generator).to(weight.dtype))
        return varied
