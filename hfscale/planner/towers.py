"""Plan what lies around the model of text."""

import inspect

from torch import nn

from ..plan.towers import TowersPlan
from .around import items_around, tensors_of
from .draft import Draft
from .probe import Probe
from .text_model import find_text_model

_PLAIN = {
    *("args", "kwargs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "head_mask"),
    *("token_type_ids", "mm_token_type_ids", "labels", "logits_to_keep", "past_key_values", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
}
"""Inputs of models of text, none of which is made of pictures but the embeddings."""


def plan_towers(draft: Draft) -> None:
    """Name the modules and parameters that a text without pictures does not reach."""
    text = find_text_model(draft.model)
    if text is None:
        return
    layers = _unreached(draft) if draft.layout.data_world > 1 else []
    around = [item for item in items_around(draft.model, text) if tensors_of(draft.model, item)]
    items = tuple(item for item in (*around, *layers) if item != draft.head)
    sizes = {tensor: size for item in items for tensor, size in tensors_of(draft.model, item).items()}
    if sizes:
        draft.features.append(TowersPlan(text, items, sum(sizes.values()), other_inputs(draft.modules[text])))


def other_inputs(text: nn.Module) -> tuple[str, ...]:
    """Inputs of a model of text that models of text alone do not have."""
    return tuple(name for name in inspect.signature(text.forward).parameters if name not in _PLAIN)


def _unreached(draft: Draft) -> list[str]:
    """Layers that a pass over tokens alone leaves out: they read what a tower made, and nothing else."""
    probe = _ReachProbe(draft)
    return [] if probe.failure else [layer for layer in draft.layers if layer not in probe.reached]


class _ReachProbe(Probe):
    """A run on tokens.

    Attributes:
        reached: the layers that were called.
    """

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.reached: set[str] = set()
        for layer in draft.layers:
            self._before(draft.modules[layer], lambda *_, name=layer: self.reached.add(name))
        self._run(draft.model)
