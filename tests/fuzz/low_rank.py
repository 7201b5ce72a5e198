"""Gradients that replicas have sent each other as factors (PowerSGD), judged by what they are of the true ones.

Where weights stay as they are, every step's true gradient ``M`` is known. With the error ``E`` of the steps before,
what a rank finds of its shard is ``P P^T (M + E)`` with orthonormal ``P [m, r]``, and the rest is the next error. So
``found`` is the orthogonal projection of ``M + E`` to ``r`` dimensions, or all of it where factors would be no smaller;
the first ``P`` spans columns of ``M``.
"""

import torch
from torch import Tensor

from hfscale.testing.differences import difference

from .measures import EXACT


class LowRank:
    """The matrices of one rank.

    Args:
        rank: of the factors.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._missed = rank, dict[str, Tensor]()

    def difference(
        self, name: str, found: Tensor, wanted: Tensor, floor: float, terms: int = 1
    ) -> float:
        """How far a share is from such a projection, relative to the largest entry of what is projected.

        Args:
            floor: the least that counts as largest.
            terms: of which it is the sum, each of them sent as factors of its own: a projection where there is one,
                and of no more dimensions than theirs together in any case.
        """
        first = name not in self._missed
        whole = wanted + self._missed.get(name, 0.0)
        self._missed[name] = whole - found
        exact = difference(found, whole, whole, floor)
        if exact <= EXACT or whole.ndim < 2:
            return exact
        matrix = whole.flatten(1)
        part = found.flatten(1)
        scale = max(float(matrix.norm()), floor)
        if float(part.norm()) < 1e-6 * scale:
            return 1.0
        across = float((part.T @ (matrix - part)).norm()) / scale**2
        rest = float(torch.linalg.svdvals(part)[self._rank * terms :].norm()) / scale
        if terms > 1:
            return rest
        if not first:
            return max(across, rest)
        left, values, _ = torch.linalg.svd(matrix, full_matrices=False)
        left = left[:, values > 1e-12 * values[0]]
        return max(across, rest, float((part - left @ (left.T @ part)).norm()) / scale)

    def forget(self) -> None:
        """Another layout goes on without errors."""
        self._missed = {}
