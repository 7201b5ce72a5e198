"""Random streams under tensor parallelism (dropout).

Two streams per rank. The *replicated* one is torch's default generator: activations that are whole must see the same
mask on every tensor rank, so all ranks of a tensor group draw the same numbers from it; ranks with different batches
draw different ones. The *cut* one serves activations that are spread over the ranks (attention weights): each rank
must draw numbers of its own.

The cut stream is not stored: on entering a cut region its seed is derived from the state of the replicated stream and
the tensor rank, and on leaving the replicated stream goes on where it was. Whatever restores the default generator
(activation checkpointing, a resumed run) therefore restores both.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..mesh import Mesh


def cut_region(block: nn.Module, exits: Sequence[nn.Module], rank: int) -> None:
    """Draw from the cut stream between the entry of ``block`` and the entry of its row projections ``exits``."""
    saved: list[torch.Tensor] = []

    def into(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training:
            device = next(module.parameters()).device
            generator = default_generator(device)
            # One number is drawn so that the next region, which may draw nothing else between, starts elsewhere.
            torch.empty(1, device=device).uniform_()
            saved.append(generator.get_state())
            generator.manual_seed(_derive(saved[-1], rank))

    def back(module: nn.Module, args: tuple[Any, ...]) -> None:
        if saved:
            default_generator(next(module.parameters()).device).set_state(saved.pop())

    block.register_forward_pre_hook(into)
    for module in exits:
        module.register_forward_pre_hook(back)


def agree_on_replicated_stream(mesh: Mesh) -> None:
    """Give all ranks of a tensor group the state of its first rank, and every distinct batch a stream of its own.

    Batch 0 keeps the stream it has, so that one process and a tensor-parallel run draw the same masks.
    """
    group = mesh.group("tp")
    # Also on a GPU some models draw from the CPU's stream (which layers to drop).
    for device in dict.fromkeys((torch.device("cpu"), mesh.device)):
        generator = default_generator(device)
        state = generator.get_state()
        if group is not None:
            carried = state.to(mesh.device)
            dist.broadcast(carried, group=group, group_src=0)
            state = carried.cpu()
            generator.set_state(state)
        if mesh.batch_rank > 0:
            generator.manual_seed(_derive(state, mesh.batch_rank))


def default_generator(device: torch.device) -> torch.Generator:
    """Torch's default generator of ``device``."""
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _derive(state: torch.Tensor, rank: int) -> int:
    digest = hashlib.blake2b(state.cpu().numpy().tobytes(), key=str(rank).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
