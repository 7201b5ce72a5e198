"""Add and prove roles that a blueprint lacks inside its blocks: mostly norms of queries and keys."""

import json
from dataclasses import replace
from typing import Any

from torch import nn

from ...models.blueprint import Block, Blueprint
from ...models.facts import ask
from ...models.inference import block_as_data


def complete(model: Any, blueprint: Blueprint, layers: list[str], forgotten: list[str]) -> Blueprint | None:
    """Return ``blueprint`` with roles for parameters that it lacks, if two ranks of a clone compute the same as one.

    A norm as wide as a projection that is cut is computed across; anything else is used whole.

    Args:
        layers: of the model.
        forgotten: names of parameters inside the blocks.
    """
    found = dict(blueprint.blocks)
    for path in blueprint.blocks:
        for layer in layers:
            block = f"{layer}.{path}" if path else layer
            found[path] = _with_roles(model, block, found[path], _forgotten_in(block, forgotten))
    said = replace(blueprint, blocks=found)
    about = json.dumps({path: block_as_data(block) for path, block in found.items()}, sort_keys=True)
    return said if ask("completed", model, about, blueprint=said, forgotten=forgotten) else None


def _forgotten_in(block: str, forgotten: list[str]) -> list[str]:
    own = (name.removeprefix(f"{block}.") for name in forgotten if name.startswith(f"{block}."))
    return list(dict.fromkeys(name.rpartition(".")[0] for name in own))


def _with_roles(model: Any, block: str, role: Block, children: list[str]) -> Block:
    modules = dict(model.named_modules())
    widths = {_outputs(modules.get(f"{block}.{column}")) for column in role.column}
    shared, across, keys = list(role.shared), list(role.across), dict(role.key_value)
    for child in children:
        weight = getattr(modules.get(f"{block}.{child}"), "weight", None)
        wide = weight is not None and weight.ndim == 1 and len(weight) in widths
        chosen = across if wide else shared
        chosen += [child] if child not in chosen else []
        if wide and child.startswith("k"):
            keys[child] = ()
    return replace(role, shared=tuple(shared), across=tuple(across), key_value=keys)


def _outputs(module: nn.Module | None) -> int | None:
    return getattr(module, "out_features", None)
