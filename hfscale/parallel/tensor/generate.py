"""``generate()`` under tensor parallelism: every rank of a group runs it, and must pick the same tokens.

Logits are equal on all ranks, so greedy search agrees by itself. Sampling draws from torch's default generator:
``generate`` first broadcasts rank 0's state, however the ranks were seeded.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist

from ...mesh import Mesh
from .random import default_generator


def install_generate(model: Any, mesh: Mesh) -> None:
    """Make ``model.generate`` sample the same tokens on all tensor ranks. Do nothing for one rank, or without it."""
    group, generate = mesh.tp_group, getattr(model, "generate", None)
    if group is None or generate is None:
        return

    @functools.wraps(generate)
    def generate_alike(*args: Any, **kwargs: Any) -> Any:
        for device in dict.fromkeys((torch.device("cpu"), mesh.device)):
            generator = default_generator(device)
            state = generator.get_state().to(mesh.device)
            dist.broadcast(state, group=group, group_src=0)
            generator.set_state(state.cpu())
        return generate(*args, **kwargs)

    model.generate = generate_alike
