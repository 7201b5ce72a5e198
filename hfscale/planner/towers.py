"""Plan what lies around the model of text."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._host.torch import tree_leaves
from .._host.transformers.classes import takes_argument
from ..families.expert_modules import takes_routes
from ..plan.towers import TowersPlan
from .around import items_around, tensors_of
from .draft import Draft
from .probe import PROBED, Probe, tiny_model
from .text_model import find_text_model, other_inputs

_ADDED_BEHIND_LAYERS = {"visual_pos_masks", "deepstack_visual_embeds"}
"""Inputs by which a model of text adds features of pictures behind its first layers (Meng et al. 2024, DeepStack)."""

_FEATURES = "deepstack_visual_indexes"
"""The config field that lists a tower's layers whose features these are."""

_MEDIA = ("pixel_values", "flattened_patches", "input_features", "input_values")
"""Inputs that are pictures or sounds, as the host names them."""


def plan_towers(draft: Draft) -> None:
    """Name the modules and parameters that a text without pictures does not reach."""
    text = find_text_model(draft.model)
    if text is None:
        _plan_beside_tokens(draft)
        return
    layers = _unreached(draft) if draft.layout.data_world > 1 else []
    around = [item for item in items_around(draft.model, text) if tensors_of(draft.model, item)]
    items = tuple(item for item in (*around, *layers) if item != draft.head)
    sizes = {tensor: size for item in items for tensor, size in tensors_of(draft.model, item).items()}
    if sizes:
        inputs = other_inputs(draft.modules[text])
        first = _first_layers(draft.config.to_dict()) if set(inputs) == _ADDED_BEHIND_LAYERS else 0
        draft.features.append(TowersPlan(text, items, sum(sizes.values()), inputs, first))


def _first_layers(fields: Mapping[str, Any]) -> int:
    """Return behind how many of the first layers pictures are added: as many as there are features of a tower."""
    inside = (_first_layers(value) for value in fields.values() if isinstance(value, dict))
    return max([len(fields.get(_FEATURES) or ()), *inside])


def _unreached(draft: Draft) -> list[str]:
    """Layers that a pass over tokens alone leaves out: they read what a tower made, and nothing else."""
    probe = _ReachProbe(draft.model, draft.layers)
    return [] if probe.failure else [layer for layer in draft.layers if layer not in probe.reached]


def _plan_beside_tokens(draft: Draft) -> None:
    """The same of a model that is its own model of text, or has an encoder and a decoder: what no operation of a pass
    over tokens uses. A batch may have no pictures where such a pass runs.
    """
    media = any(takes_argument(draft.model, name) for name in _MEDIA)
    if draft.layout.data_world == 1 or not media or not takes_argument(draft.model, "input_ids"):
        return
    model: Any = draft.model
    probe = _ReachProbe(model, [])
    if probe.failure:  # without memory; a clone has the same modules, but for its layers
        model = tiny_model(draft.model)
        probe = _ReachProbe(model, []) if model is not None else probe
    known = {*draft.modules, *(name for name, _ in draft.named())}
    items = [item for item in _unused(model, probe.used) if item in known] if not probe.failure else []
    sizes = {tensor: size for item in items for tensor, size in tensors_of(draft.model, item).items()}
    if sizes:
        draft.features.append(TowersPlan("", tuple(items), sum(sizes.values())))


def _unused(module: nn.Module, used: set[int], path: str = "") -> Iterator[str]:
    """The largest modules, and parameters of others, of which nothing is among the ``used``."""
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in used:
            yield f"{path}{name}"
    for name, child in module.named_children():
        held = {id(parameter) for parameter in child.parameters()}
        if held and not takes_routes(child):  # no token may come to an expert
            yield from _unused(child, used, f"{path}{name}.") if used & held else (f"{path}{name}",)


class _ReachProbe(Probe):
    """A run on tokens.

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
