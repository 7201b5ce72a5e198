"""Plain tensors of this rank as shards of the data axes."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def like_sharded(share: Tensor, other: Tensor) -> Tensor:
    """This rank's ``share`` as a tensor sharded as ``other`` is; the share itself where that is not sharded."""
    if not isinstance(other, DTensor):
        return share
    mesh, placements = other.device_mesh, other.placements
    return DTensor.from_local(share, mesh, placements, run_check=False, shape=other.shape, stride=other.stride())


def memory_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of, by torch's protocol for such: itself, where it is plain."""
    if isinstance(tensor, DTensor):
        return memory_of(tensor.to_local())
    parts = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if parts is None else [getattr(tensor, name) for name in parts()[0]]


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor this rank holds of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
