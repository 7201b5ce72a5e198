"""Compress the gradients that replicas exchange: to 16 bits, or by an extension's method.

With compression, FSDP2 handles only ``dp_shard``: it reduces the gradients of each layer in one flat buffer. This
module then averages each buffer over ``dp_replicate``: ``buffer / n -> 16 bits -> sum over replicas -> buffer``, or by
a :class:`Compressor`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._compat.torch_fsdp import parameter_groups
from ...distributed.mesh import Mesh
from ...extensions import provided
from ...plan import Plan
from ...plan.parameter import data_axes

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def narrow_mean(flat: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Average gradients over the replicas in place, and send them in ``dtype``."""
    sent = (flat / dist.get_world_size(group)).to(dtype)
    dist.all_reduce(sent, group=group)
    flat.copy_(sent)


class Compressor:
    """Average the gradients of one flat buffer over replicas in place; subclasses compress the gradients.

    Args:
        group: the process group of the replicas.
        sizes: the shapes of the buffer's parameters, in order.
        rank: rank of low-rank factors, the layout's ``powersgd_rank``.
        seed: the seed of the compressor's random numbers, different for each buffer.
        unit: returns the factor on the loss before its backward pass, by which the gradients are multiplied.
    """

    # default rank of the factors; ``None`` if the compressor has no factors
    default_rank: int | None = None

    def __init__(
        self,
        group: dist.ProcessGroup,
        sizes: Sequence[Sequence[int]],
        rank: int,
        seed: int,
        unit: Callable[[], float],
    ) -> None:
        raise NotImplementedError

    def __call__(self, flat: Tensor) -> None:
        """Average ``flat`` over the replicas in place."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the compressor keeps between steps."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the compressor's state for a saved training state."""
        return {}

    def put_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Load the state that :meth:`state` returned."""

    @staticmethod
    def entries_kept(shape: Sequence[int], rank: int) -> int:
        """Return how many numbers the compressor keeps between steps for a gradient of this shape."""
        return 0


def compresses(plan: Plan) -> bool:
    """Return whether the plan's layout compresses the gradients that replicas exchange."""
    return plan.layout.gradient_compression != "no"


def install_compression(
    model: nn.Module, plan: Plan, mesh: Mesh, unit: Callable[[], float]
) -> list[Compressor]:
    """Replace FSDP2's average of gradients over replicas by a compressed one.

    Return the compressors, since they have a state (such as error feedback) that belongs to a saved training state.
    """
    kept = list[Compressor]()
    asked = str(plan.layout.gradient_compression)
    compressor = provided("gradient_compressions", asked)
    experts = tuple(f"{expert.name}." for expert in plan.experts)
    for number, group in enumerate(parameter_groups(model)):
        replicas = mesh.group(
            data_axes(f"{group.module}.".startswith(experts) if experts else False)[0]
        )
        if replicas is not None:
            if compressor is None:
                group.average_by(partial(narrow_mean, group=replicas, dtype=NARROW[asked]))
                continue
            rank = int(plan.layout.powersgd_rank or 1)
            kept.append(compressor(replicas, group.sizes, rank, number, unit))
            group.average_by(kept[-1])
    return kept
