"""Find the modules and parameters beside a list of layers, or beside a text model."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..._compat.torch import own_modules
from ..parameter import join_path

PROBED = (1, 2)
"""Samples, and tokens of each, by which a model is tried."""

ALONE = ", and only the stream travels between stages"
GIVEN = f"its layers are given what another layer computed, besides the stream{ALONE}"


def items_around(model: nn.Module, path: str) -> Iterator[str]:
    """List the parameters and submodules of every module that contains ``path``, from the outside inwards."""
    owner = ""
    for inner in path.split("."):
        module = model.get_submodule(owner)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        # Not named_children, which leaves out a module's second name.
        names += [name for name, child in own_modules(module).items() if child is not None and name != inner]
        yield from (join_path(owner, name) if owner else name for name in names)
        owner = join_path(owner, inner) if owner else inner


def tensors_of(model: nn.Module, item: str) -> dict[int, int]:
    """Map the ``id`` of each parameter in an item (a module, or a parameter itself) to its number of entries."""
    owner, _, child = item.rpartition(".")
    found = getattr(model.get_submodule(owner), child)
    held = found.parameters() if isinstance(found, nn.Module) else [found]
    return {id(parameter): parameter.numel() for parameter in held}


def direct_children(modules: dict[str, Any], owner: str) -> list[str]:
    """Return the full names of the modules directly below ``owner``."""
    return [join_path(owner, name) if owner else name for name, _ in modules[owner].named_children()]
