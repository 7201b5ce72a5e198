"""Read fields of a config, some of which may have a different value for each layer.

transformers raises ``AmbiguousGlobalPerLayerAttributeError``, a ``RuntimeError``, if such a field is read from the
config itself.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

HEAD_FIELDS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
"""Config fields with the number of attention heads."""

LENGTHS = {
    "max_position_embeddings": 0,
    "n_positions": 0,
    "original_max_position_embeddings": 0,
    "sliding_window": 0,
    "attention_chunk_size": 0,
    "window_size": 0,
    "index_block_size": 0,
    "index_topk": 0,
    "floor_scale": 1,
}
"""Config field -> an offset. The field's value minus the offset is a number of tokens: longer texts are computed in
another way (by other frequencies, or with a window)."""
_WHY = {
    "output_attentions": "would return the attention weights of this rank's heads only",
    "output_router_logits": "adds a loss on the router that every tensor rank would add once (load the model with "
    "routing=hfscale.RoutingConfig(balance_loss=...) for a router loss that is added once in total)",
}


def text_config(config: Any) -> Any:
    """Return the config of the text decoder."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def field(holder: Any, name: str, default: Any = None) -> Any:
    """Return a config field or module attribute; ``default`` if it does not exist, or has a value per layer."""
    try:
        return getattr(holder, name, default)
    except RuntimeError:
        return default


def first_count(holder: Any, names: Iterable[str]) -> int | None:
    """Return the value of the first field in ``names`` that is a positive integer; ``None`` if there is none."""
    values = (field(holder, name) for name in names)
    return next(
        (v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None
    )


def counts(config: Any, names: Iterable[str]) -> set[int]:
    """Return the value of the first field in ``names`` that is a positive integer, or its values over all layers."""
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
    ):  # transformers may fail to read the fields of every layer
        return set()
    of_layers = (first_count(layer, names) for layer in layers)
    return {count for count in of_layers if count is not None}


def lengths_of(config: Any) -> dict[str, int]:
    """Return, by name, the numbers of tokens of the ``LENGTHS`` fields of the text config and its rotary embeddings. If
    a field occurs several times, the smallest value counts.
    """
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
    """Return a copy of a config in which the fields named in ``lengths`` have these values, also in rotary
    embeddings.
    """
    changed = copy.deepcopy(config)
    for fields in _mappings(text_config(changed)):
        fields.update({name: length for name, length in lengths.items() if fields.get(name)})
    return changed


def _mappings(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the dict of the config's fields, and the dicts of its rotary embeddings' fields, one per kind of layer."""
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
    """Return, in words, why an output that is requested by config or ``arguments`` would be incomplete on a tensor
    rank; ``None`` if no such output is requested.
    """
    given = arguments or {}
    text = text_config(config)
    for name, why in _WHY.items():
        asked = given.get(name)
        if field(text, name, False) if asked is None else asked:
            return f"{name}=True {why}"
    return None
