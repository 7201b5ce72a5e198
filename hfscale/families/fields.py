"""Numbers that a config gives, where layers of one model may have numbers of their own.

The host refuses to read such a field from the config as a whole (``AmbiguousGlobalPerLayerAttributeError``, which is a
``RuntimeError``); there is no one answer then, but one per layer.
"""

from collections.abc import Iterable
from typing import Any

HEAD_FIELDS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
"""Config fields that say how many heads there are."""


def text_config(config: Any) -> Any:
    """The part of a config that speaks of the decoder of text."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def field(holder: Any, name: str, default: Any = None) -> Any:
    """A field of a config, or an attribute of a module; ``default`` where there is none, or one per layer."""
    try:
        return getattr(holder, name, default)
    except RuntimeError:
        return default


def first_count(holder: Any, names: Iterable[str]) -> int | None:
    """The first of some fields that is a positive number."""
    values = (field(holder, name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def counts(config: Any, names: Iterable[str]) -> set[int]:
    """The first of some fields that is a positive number: one, or what it is in each layer."""
    names = tuple(names)
    found = first_count(config, names)
    if found is not None:
        return {found}
    try:
        layers = list(getattr(config, "per_layer_config", None) or ())
    except (AttributeError, RuntimeError, TypeError, ValueError):  # the host looks at every layer, where it can
        return set()
    each = (first_count(layer, names) for layer in layers)
    return {count for count in each if count is not None}
