"""Read fields of a config whose layers may have different ones.

transformers refuses to read such a field from the config itself (``AmbiguousGlobalPerLayerAttributeError``, a
``RuntimeError``): there is one answer per layer.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HEAD_FIELDS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
"""Config fields that say how many heads there are."""

LENGTHS = {
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "original_max_position_embeddings"), 0
    ),
    **dict.fromkeys(
        ("sliding_window", "attention_chunk_size", "window_size", "index_block_size", "index_topk"),
        0,
    ),
    "floor_scale": 1,
}
"""Config fields that say up to how many tokens a text is computed in one way; less this many."""
_WHY = {
    "output_attentions": "would return the attention weights of this rank's heads only",
    "output_router_logits": "adds a loss on the router that every tensor rank would count once (load the model with "
    "routing=hfscale.RoutingConfig(balance_loss=...) for one that counts once in all)",
}


def text_config(config: Any) -> Any:
    """Return the config of the text decoder."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def field(holder: Any, name: str, default: Any = None) -> Any:
    """Return a config field or module attribute; ``default`` where there is none, or one per layer."""
    try:
        return getattr(holder, name, default)
    except RuntimeError:
        return default


def first_count(holder: Any, names: Iterable[str]) -> int | None:
    """Return the first of some fields that is a positive number."""
    values = (field(holder, name) for name in names)
    return next(
        (v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None
    )


def counts(config: Any, names: Iterable[str]) -> set[int]:
    """Return the first of some fields that is a positive number, or its values over the layers."""
    names = tuple(names)
    value = first_count(config, names)
    if value is not None:
        return {value}
    try:
        layers = list(getattr(config, "per_layer_config", None) or ())
    except (
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # the host looks at every layer, where it can
        return set()
    of_layers = (first_count(layer, names) for layer in layers)
    return {count for count in of_layers if count is not None}


def lengths_of(config: Any) -> dict[str, int]:
    """Return the ``LENGTHS`` fields of a config's text part and its rotary embeddings; of equal names, the shortest."""
    lengths = dict[str, int]()
    for fields in _mappings(text_config(config)):
        for name in LENGTHS:
            value = fields.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                lengths[name] = min(
                    int(value) - LENGTHS[name],
                    lengths.get(name, int(value)),
                )
    return lengths


def with_lengths(config: Any, lengths: Mapping[str, int]) -> Any:
    """Return a copy of a config with these ``lengths`` in all fields of the text part that have their names."""
    changed = copy.deepcopy(config)
    for fields in _mappings(text_config(changed)):
        fields.update({name: length for name, length in lengths.items() if fields.get(name)})
    return changed


def _mappings(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the config's own fields, and those of its rotary embeddings, one per kind of layer."""
    mappings: list[Any] = [vars(config), vars(config).get("rope_parameters")]
    while mappings:
        fields = mappings.pop(0)
        if isinstance(fields, dict):
            yield fields
            mappings += (
                []
                if fields is vars(config)
                else [each for each in fields.values() if isinstance(each, dict)]
            )


def query_key_value(config: Any) -> tuple[int, ...]:
    """Return the lengths of queries, keys and values that are fused side by side in one projection."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_heads = config.num_key_value_heads
    return config.num_attention_heads * head_dim, key_heads * head_dim, key_heads * head_dim


def partial_output(config: Any, arguments: dict[str, Any] | None = None) -> str | None:
    """Return, in words, the requested output (by config or ``arguments``) of which a tensor rank has only a part."""
    given = arguments or {}
    for name, why in _WHY.items():
        asked = given.get(name)
        if field(text_config(config), name, False) if asked is None else asked:
            return f"{name}=True {why}"
    return None
