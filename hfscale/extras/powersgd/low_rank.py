"""Average gradients over replicas by low-rank factors: PowerSGD (Vogels et al. 2019).

::

    M = matrix + error    P = M Q    mean of P, made orthonormal    Q = M^T P    mean of Q
    matrix <- P Q^T       error <- M - P Q^T

``matrix`` is a gradient; ``error`` is what the factors ``P`` and ``Q`` of the last step left out; ``Q`` is kept for the
next step. Each rank compresses its own shard of a matrix, like DALL-E (Ramesh et al. 2021, appendix E). Vectors are
averaged uncompressed, and so are matrices whose factors would be no smaller than the matrix. Under a loss scale, errors
are scaled like gradients, and rescaled when the loss scale changes. If a step's gradients are not finite, its errors
and factors are discarded, since they would make all later steps not finite. Matrices in 16 bits are factored in 32
bits, and their errors are kept in 32 bits too.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...distributed.ops.collectives import all_reduce_together
from ...parallel.data.gradient_compression import Compressor


class PowerSGD(Compressor):
    """Average the matrices in a flat gradient buffer over replicas by low-rank factors."""

    default_rank = 4

    def __init__(
        self,
        group: dist.ProcessGroup,
        sizes: Sequence[Sequence[int]],
        rank: int,
        seed: int,
        unit: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._group = group
        self._rank = rank
        self._sizes = [tuple(size) for size in sizes]
        self._seed = seed
        self._errors: dict[int, Tensor] = {}
        self._factors: dict[int, Tensor] = {}
        self._unit = unit
        self._made_in = 1.0

    def __call__(self, flat: Tensor) -> None:
        """Average the gradient buffer ``flat`` over the replicas, in place."""
        if sum(map(prod, self._sizes)) != flat.numel():  # some have no gradient
            self._mean([flat])
            return
        parts = list(flat.split([prod(size) for size in self._sizes]))
        matrices = {
            i: parts[i].view(size[0], -1)
            for i, size in enumerate(self._sizes)
            if self.entries_kept(size, self._rank)
        }
        unit = self._unit()
        if unit != self._made_in:
            self._errors = {i: error * (unit / self._made_in) for i, error in self._errors.items()}
            self._made_in = unit
        whole = {i: self._error(i, matrix) + matrix for i, matrix in matrices.items()}
        left = {i: matrix @ self._factor(i, matrix) for i, matrix in whole.items()}
        vectors = [part for i, part in enumerate(parts) if i not in matrices]
        self._mean([*left.values(), *vectors])
        for shape in {factor.shape for factor in left.values()}:
            alike = [i for i, factor in left.items() if factor.shape == shape]
            left |= zip(
                alike, torch.linalg.qr(torch.stack([left[i] for i in alike]))[0], strict=True
            )
        right = {i: matrix.T @ left[i] for i, matrix in whole.items()}
        self._mean(list(right.values()))
        # Reduced on the device, so that all replicas agree without a device synchronization.
        averaged = [
            *right.values(),
            *vectors,
        ]
        numbers = torch.stack([torch.isfinite(tensor).all() for tensor in averaged]).all()
        for i, matrix in matrices.items():
            error = self._error(i, matrix)
            factor = self._factor(i, whole[i])
            matrix.copy_(left[i] @ right[i].T)
            self._errors[i] = torch.where(numbers, whole[i] - matrix, error)
            self._factors[i] = torch.where(numbers, right[i], factor)

    def tensors(self) -> list[Tensor]:
        """Return the errors and factors that are kept between steps."""
        return [*self._errors.values(), *self._factors.values()]

    def state(self) -> dict[str, Any]:
        """Return the errors and factors, and the loss scale of the errors."""
        return {"errors": self._errors, "factors": self._factors, "unit": self._made_in}

    def put_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Load the errors and factors of a saved state."""
        self._errors = {i: saved.to(device) for i, saved in state["errors"].items()}
        self._factors = {i: saved.to(device) for i, saved in state["factors"].items()}
        self._made_in = state.get("unit", self._unit())  # older states have no unit

    @staticmethod
    def entries_kept(shape: Sequence[int], rank: int) -> int:
        """Return the number of values that error and factor of a gradient of this ``shape`` have; 0 if it is averaged
        uncompressed, because its factors would be no smaller.
        """
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, 1)
        is_smaller = rank * (rows + columns) < rows * columns and rank <= min(rows, columns)
        return (rows + rank) * columns if is_smaller else 0

    def _error(self, i: int, matrix: Tensor) -> Tensor:
        # Errors have at least 32 bits: they include the rounding of 16-bit matrices.
        if i not in self._errors:
            self._errors[i] = torch.zeros_like(
                matrix, dtype=torch.promote_types(matrix.dtype, torch.float32)
            )
        return self._errors[i]

    def _factor(self, i: int, matrix: Tensor) -> Tensor:
        if i not in self._factors:
            self._factors[i] = first_factor(
                self._seed,
                i,
                matrix.shape[1],
                self._rank,
            ).to(matrix)
        return self._factors[i]

    def _mean(self, tensors: list[Tensor]) -> None:
        """Average tensors over the replicas, in place, by one all-reduce."""
        if tensors:
            all_reduce_together(tensors, self._group, dist.get_world_size(self._group))


def first_factor(seed: int, number: int, columns: int, rank: int) -> Tensor:
    """Return the random normal factor ``[columns, rank]`` with which PowerSGD begins, for matrix ``number`` of a
    gradient buffer.
    """
    return torch.randn(
        columns,
        rank,
        generator=torch.Generator().manual_seed(1000 * seed + number),
    )
