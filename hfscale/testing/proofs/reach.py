"""Prove what a pass over tokens alone does not reach: layers and modules that read a tower's output."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..._compat.torch import tree_leaves
from ..._compat.transformers.classes import takes_argument
from ...models.expert_modules import takes_routes
from ...plan.drafting.boundary_modules import PROBED
from .clones import tiny_model
from .probe import Probe


def prove_reach(model: Any, layers: list[str]) -> tuple[dict[str, list[str]], bool]:
    """Return the layers that are not called: ``classes`` of which none is, or else ``names``."""
    probe = _ReachProbe(model, layers)
    if probe.failure:
        return {"classes": [], "names": []}, True
    kinds = {layer: type(model.get_submodule(layer)).__name__ for layer in layers}
    left_out = [layer for layer in layers if layer not in probe.reached]
    classes = sorted({kinds[layer] for layer in left_out})
    if {kinds[layer] for layer in probe.reached}.isdisjoint(classes):
        return {"classes": classes, "names": []}, True
    return {"classes": [], "names": left_out}, False


def prove_unused(model: Any) -> tuple[list[str], bool]:
    """Return the largest modules, and parameters of others, that no operation uses."""
    probe = _ReachProbe(model, [])
    if probe.failure and (clone := tiny_model(model)) is not None:  # without memory
        model, probe = clone, _ReachProbe(clone, [])
    items = list(_unused(model, probe.used)) if not probe.failure else []
    return items, not any(part.isdigit() for item in items for part in item.split("."))


def _unused(module: nn.Module, used: set[int], path: str = "") -> Iterator[str]:
    """Yield the largest modules, and other modules' parameters, that hold none of the ``used`` parameters."""
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in used:
            yield f"{path}{name}"
    for name, child in module.named_children():
        held = {id(parameter) for parameter in child.parameters()}
        if held and not takes_routes(child):  # no token may come to an expert
            yield from _unused(child, used, f"{path}{name}.") if used & held else (f"{path}{name}",)


class _ReachProbe(Probe):
    """Run a model on tokens.

    Attributes:
        reached: the layers that were called.
        used: the parameters that an operation was given, by their identity.
    """

    def __init__(self, model: Any, layers: list[str]) -> None:
        super().__init__()
        self.reached: set[str] = set()
        self.used: set[int] = set()
        self._parameters = {id(parameter) for parameter in model.parameters()}
        for layer in layers:
            self._before(model.get_submodule(layer), lambda *_, name=layer: self.reached.add(name))
        places = torch.zeros(*PROBED, 4, device=next(model.parameters()).device)
        self._run(model, **({"bbox": places} if takes_argument(model, "bbox") else {}))  # of tokens on a page

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used |= self._parameters.intersection(map(id, tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))
