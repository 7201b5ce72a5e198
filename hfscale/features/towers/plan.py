"""Plan the modules that a forward pass of text alone does not use: towers of pictures and sounds, and projectors."""

from collections.abc import Mapping
from typing import Any

from ..._compat.transformers.classes import takes_argument
from ...models.facts import ask
from ...models.names import wild_name
from ...plan.drafting.draft import Draft
from ...plan.drafting.text_model import find_text_model, other_inputs
from ...plan.feature_plans import TowersPlan

_ADDED_BEHIND_LAYERS = {"visual_pos_masks", "deepstack_visual_embeds"}
"""Inputs of a text model that adds features of pictures after its first layers (Meng et al. 2024, DeepStack)."""

# The config field that lists the tower's layers whose outputs are added to hidden states of the text model
_FEATURES = "deepstack_visual_indexes"

_MEDIA = ("pixel_values", "flattened_patches", "input_features", "input_values")
"""transformers' names of inputs that are pictures or sounds."""


def plan_towers(draft: Draft) -> None:
    """Find the modules and parameters that a forward pass of text alone does not use, and plan them as towers."""
    text = find_text_model(draft.model)
    items = _beside_tokens(draft) if text is None else _around_text(draft, text)
    if not items:
        return
    from ...plan.drafting.boundary_modules import tensors_of

    sizes = {
        tensor: size for item in items for tensor, size in tensors_of(draft.model, item).items()
    }
    if sizes:
        inputs = () if text is None else other_inputs(draft.modules[text])
        first = _first_layers(draft.config.to_dict()) if set(inputs) == _ADDED_BEHIND_LAYERS else 0
        draft.features.append(
            TowersPlan(text or "", tuple(items), sum(sizes.values()), inputs, first)
        )


def _around_text(draft: Draft, text: str) -> list[str]:
    """Return the modules and parameters outside the text model, except the head, and the layers of the text model that
    a forward pass of text alone skips.
    """
    from ...plan.drafting.boundary_modules import items_around, tensors_of

    layers: list[str] = []
    # Layers that read only a tower's output are skipped if there is no picture or sound.
    if draft.layout.data_world > 1:
        facts = ask(
            "reach",
            draft.model,
            *dict.fromkeys(map(wild_name, draft.stack)),
            layers=draft.stack,
        )
        classes = set(facts["classes"])
        names = set(facts["names"])
        layers = [
            name
            for name in draft.stack
            if name in names or type(draft.modules[name]).__name__ in classes
        ]
    around = [item for item in items_around(draft.model, text) if tensors_of(draft.model, item)]
    return [item for item in (*around, *layers) if item != draft.head]


def _first_layers(fields: Mapping[str, Any]) -> int:
    """Return the number of the text model's first layers after which features of pictures are added to hidden states:
    one for each layer of the tower in the config's ``deepstack_visual_indexes``.
    """
    inside = (_first_layers(value) for value in fields.values() if isinstance(value, dict))
    return max([len(fields.get(_FEATURES) or ()), *inside])


def _beside_tokens(draft: Draft) -> list[str]:
    """Return the modules and parameters that a forward pass of text alone does not use, in an encoder-decoder or a
    model that has no separate text model.
    """
    media = any(takes_argument(draft.model, name) for name in _MEDIA)
    if draft.layout.data_world == 1 or not media or not takes_argument(draft.model, "input_ids"):
        return []
    # A clone has the same modules, except for the number of layers.
    known = {
        *draft.modules,
        *(name for name, _ in draft.named()),
    }
    return [item for item in ask("unused", draft.model) if item in known]
