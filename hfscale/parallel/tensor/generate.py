"""``generate()`` under tensor parallelism: every rank of a group runs it, and must pick the same tokens.

Logits are equal on all ranks, so greedy search agrees by itself. Sampling draws from torch's default generator: the
first rank's state is given to the others when ``generate`` is called, however each of them was seeded.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist

from ...distributed.mesh import Mesh
from .random import default_generator


def install_generate(model: Any, mesh: Mesh) -> None:
    """Make ``model.generate`` sample alike on all tensor ranks. No-op for one rank, or where there is none."""
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
