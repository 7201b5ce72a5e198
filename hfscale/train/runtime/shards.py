"""Conversion between plain local tensors and DTensors of the data axes."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def like_sharded(share: Tensor, other: Tensor) -> Tensor:
    """Return this rank's ``share`` as a DTensor sharded like ``other``; unchanged if ``other`` is no DTensor."""
    if not isinstance(other, DTensor):
        return share
    mesh, placements = other.device_mesh, other.placements
    return DTensor.from_local(share, mesh, placements, run_check=False, shape=other.shape, stride=other.stride())


def memory_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a tensor, by torch's ``__tensor_flatten__``; a plain tensor is its own."""
    if isinstance(tensor, DTensor):
        return memory_of(tensor.to_local())
    parts = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if parts is None else [getattr(tensor, name) for name in parts()[0]]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the plain tensor this rank holds of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
