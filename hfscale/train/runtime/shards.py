"""Convert between this rank's shards as plain tensors and DTensors that are sharded over data ranks."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...distributed.mesh import Mesh
from ...distributed.ops.collectives import all_gather
from ...plan import Cut, Plan, write_share
from ...plan.cut import cut_shape


def like_sharded(share: Tensor, other: Tensor) -> Tensor:
    """Return this rank's shard ``share`` as a DTensor that is sharded like ``other``; return it unchanged if ``other``
    is not a DTensor.
    """
    if not isinstance(other, DTensor):
        return share
    mesh = other.device_mesh
    placements = other.placements
    return DTensor.from_local(
        share, mesh, placements, run_check=False, shape=other.shape, stride=other.stride()
    )


def memory_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of which a tensor subclass consists, by torch's ``__tensor_flatten__``, or of a DTensor
    those of its local shard. A plain tensor is returned itself.
    """
    if isinstance(tensor, DTensor):
        return memory_of(tensor.to_local())
    parts = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if parts is None else [getattr(tensor, name) for name in parts()[0]]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a parameter or gradient as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def gradients_aside(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Compute gradients inside the ``with`` block separately from the gradients that parameters already have. At its
    end, add them in place to the earlier gradients; if the block raises, drop them.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        raise
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def gather_full(
    share: Tensor,
    shape: Sequence[int],
    cuts: Sequence[Cut],
    mesh: Mesh,
) -> Tensor:
    """All-gather a full tensor of ``shape`` from the shards ``share`` of all ranks, without autograd. ``cuts`` describe
    how it is sharded, one entry per mesh axis, in order.
    """
    whole = share.detach()
    for done in reversed(range(len(cuts))):
        cut = cuts[done]
        group = mesh.group(cut.axis)
        if group is None:
            continue
        length = cut_shape(shape, cuts[:done], mesh.ranks)[cut.dim]
        lengths = [cut.local_length(length, rank) for rank in range(cut.size)]
        every = all_gather(whole, lengths, cut.dim, group)
        if not cut.parts and cut.most_replicas == 1:
            whole = every
            continue
        whole = every.new_empty(
            [length if dim == cut.dim else size for dim, size in enumerate(every.shape)]
        )
        for rank, piece in enumerate(every.split(lengths, cut.dim)):
            write_share(whole, piece, [cut], {cut.axis: rank})
    return whole


@dataclass
class LocalWeights:
    """Hold this rank's shards of all weights while they are in no model: after they were loaded, or taken out of a
    model, and before they are installed in one.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)  # by owned name
    # the additional tensors of quantized weights: module, parameter name, and this rank's shard, or the parameter
    # itself if it has a bitsandbytes class
    quantized: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    plan: Plan | None = None  # the plan, corrected by the loaded checkpoint

    def numbers_besides(self, lacking: Collection[str]) -> dict[str, Tensor]:
        """Return the shards that hold ordinary numbers, by name. Left out are the weights ``lacking``, which have no
        values yet, and quantized weights, whose bytes may be stored in a floating-point dtype.
        """
        skipped = {*lacking, *(() if self.plan is None else self.plan.quantized_weights)}
        return {name: tensor for name, tensor in self.tensors.items() if name not in skipped}
