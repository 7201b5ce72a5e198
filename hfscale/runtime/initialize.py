"""Random weights that do not depend on the layout.

The model is initialized by its own code, unit by unit (a decoder layer, the embedding, ...), each from a seed made of
the run's seed and the unit's name, whole and on the CPU; every rank keeps its share and drops the rest. No rank ever
holds more than one whole unit.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._host.transformers.initialization import initialize_weights
from ..files.slices import is_elsewhere
from ..mesh import Mesh
from ..plan import Plan


def initialize_local_weights(
    template: Any, plan: Plan, mesh: Mesh, seed: int, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's shares of freshly initialized parameters on this rank, and the whole buffers.

    Args:
        template: the stock model on the meta device, whole; its modules are filled and emptied again one by one.
        plan: how its parameters are cut.
        mesh: this rank's place.
        seed: the run's seed.
        wanted: which of the parameters that this rank's stages hold are needed, by their owned name.
    """
    rank = mesh.ranks["pp"]
    held = plan.local_names(rank)
    shares: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for name, unit, recurse in _units(template, "", set(plan.layers)):
        prefix = f"{name}." if name else ""
        parameters = [prefix + key for key, _ in unit.named_parameters(recurse=recurse)]
        names = [key for key in parameters if plan.by_name[key].tied_to is None and key in held and wanted(key)]
        every_buffer = [prefix + key for key, _ in unit.named_buffers(recurse=recurse)]
        buffer_names = [key for key in every_buffer if not is_elsewhere(plan, rank, key)]
        if not names and not buffer_names:
            continue
        unit.to_empty(device="cpu", recurse=recurse)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(seed, name))
            initialize_weights(template, unit, recurse)
        for key in names:
            whole = template.get_parameter(key).detach()
            shares[key] = plan.by_name[key].take(whole, mesh.ranks).to(mesh.device, copy=True)
        for key in buffer_names:
            buffers[key] = template.get_buffer(key).to(mesh.device)
        unit.to_empty(device="meta", recurse=recurse)
    return shares, buffers


def _units(module: nn.Module, name: str, layers: set[str]) -> Iterator[tuple[str, nn.Module, bool]]:
    """``(name, module, recurse)``: whole subtrees that hold no layer or are one, and the modules above layers alone."""
    inside = {child for child, _ in module.named_modules(prefix=name)}
    if name in layers or not inside & layers:
        yield name, module, True
        return
    yield name, module, False
    for child, submodule in module.named_children():
        yield from _units(submodule, f"{name}.{child}" if name else child, layers)


def seed_of(seed: int, name: str) -> int:
    """A seed for the part of a model called ``name``."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
