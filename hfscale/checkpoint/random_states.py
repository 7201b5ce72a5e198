"""Save and restore a rank's RNG states.

In another layout, a rank continues the RNG state of a saved rank with the same data rank, or, if none exists, a state
that is derived from the first rank's state. Dropout masks then differ from the uninterrupted run, and no two ranks draw
the same numbers.
"""

import random
from typing import Any

import numpy as np
import torch

from ..distributed.mesh import Mesh
from ..parallel.tensor.random import default_generator, derive_seed


def random_states(mesh: Mesh) -> dict[str, Any]:
    """Return this rank's RNG states as plain data."""
    version, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    states = {
        "torch": torch.random.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            str(version),
            torch.as_tensor(np.asarray(keys, dtype=np.int64)),
            position,
            has_gauss,
            gauss,
        ),
    }
    if mesh.device.type != "cpu":
        states["device"] = default_generator(mesh.device).get_state()
    return states


def states_of_process(
    python: Any, numpy: Any, cpu: torch.Tensor, device: torch.Tensor | None = None
) -> dict[str, Any]:
    """Convert the RNG states of a process, saved by another trainer, to this module's format."""
    name, keys, *rest = numpy
    kept = (name, torch.as_tensor(np.asarray(keys, dtype=np.int64)), *rest)
    states = {"torch": cpu, "python": python, "numpy": kept}
    return states if device is None else {**states, "device": device}


def place_among(mesh: Mesh, of_batches: bool) -> str:
    """Return a label of this rank among all ranks that restore the same saved RNG states, from which it seeds states of
    its own. The first of these ranks, which continues the saved states, gets an empty label. ``of_batches``: one RNG
    state was saved for each batch of a step, and context ranks share a batch.
    """
    # Context ranks and stages of one batch compute different values, so they draw different numbers.
    data = mesh.data_rank % mesh.layout.cp if of_batches else mesh.data_rank
    return f"{data}, stage {mesh.pp_rank}" if data or mesh.pp_rank else ""


def restore_random_states(mesh: Mesh, states: dict[str, Any], place: str = "") -> None:
    """Restore RNG states. With a label ``place``, seed new states from ``states`` and the label instead, because
    another rank continues ``states``.
    """
    torch.random.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    device = None if mesh.device.type == "cpu" else default_generator(mesh.device)
    if device is not None and "device" in states:
        device.set_state(states["device"])
    elif device is not None:
        device.manual_seed(derive_seed(states["torch"], "device"))
    if place:
        seed = derive_seed(states["torch"], place)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        if device is not None:
            device.manual_seed(derive_seed(states.get("device", states["torch"]), place))
