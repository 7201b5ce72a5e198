"""Plan what lies around the model of text."""

from collections.abc import Mapping
from typing import Any

from .._host.transformers.classes import takes_argument
from ..families.facts import ask
from ..plan.parameter import wild_name
from ..plan.towers import TowersPlan
from .around import items_around, tensors_of
from .draft import Draft
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
    found = ask("reach", draft.model, *dict.fromkeys(map(wild_name, draft.layers)), layers=draft.layers)
    classes, names = set(found["classes"]), set(found["names"])
    return [layer for layer in draft.layers if layer in names or type(draft.modules[layer]).__name__ in classes]


def _plan_beside_tokens(draft: Draft) -> None:
    """The same of a model that is its own model of text, or has an encoder and a decoder: what no operation of a pass
    over tokens uses. A batch may have no pictures where such a pass runs.
    """
    media = any(takes_argument(draft.model, name) for name in _MEDIA)
    if draft.layout.data_world == 1 or not media or not takes_argument(draft.model, "input_ids"):
        return
    known = {*draft.modules, *(name for name, _ in draft.named())}  # a clone has the same modules, but for its layers
    items = [item for item in ask("unused", draft.model) if item in known]
    sizes = {tensor: size for item in items for tensor, size in tensors_of(draft.model, item).items()}
    if sizes:
        draft.features.append(TowersPlan("", tuple(items), sum(sizes.values())))
