"""Compute a digest of everything that an answer about a model class depends on, as its key in tables.

Answers are found on tiny clones, or hold for every size. The digest is made of the clone's config, in which sizes are
constants, without fields that no forward pass reads, and with only the sign of numbers that scale; of the kinds of
layers in the full config; and of the classes of the model's modules.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from torch import nn

from .._compat.torch import passes_otherwise
from .clone import PER_LAYER, tiny_clone
from .names import wild_name

_UNREAD = {
    *("_name_or_path", "_commit_hash", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("bos_token_id", "task_specific_params", "id2label", "label2id", "initializer_range", "use_cache"),
}
"""Fields that no forward pass reads; labels are counted."""

_SCALES = {"rope_theta", "original_max_position_embeddings", "sliding_window", "max_window_layers"}
_SCALES |= {"query_pre_attn_scalar", "rotary_emb_base", "attention_chunk_size"}
"""Whole numbers that make nothing another shape, and are no switch but where they are 0 or absent."""

_STOCK = ("transformers", "torch")
_TRIED = range(3, 67)  # tokens that proofs feed
_MANY_LABELS = 3


def digest(kind: type, config: Any, model: nn.Module | None = None) -> str:
    """Return the digest of a stock class and config; empty if no table entry could apply to them, or if ``model`` has
    hooks, foreign classes or a changed ``forward``.
    """
    classes = {kind, *(map(type, model.modules()) if model is not None else ())}
    if not all(map(_is_stock, classes)) or (model is not None and any(map(passes_otherwise, model.modules()))):
        return ""
    try:
        small = tiny_clone(config)
    except Exception:  # whatever stock code says of sizes that it checks against one another
        return ""
    labels = min(int(getattr(config, "num_labels", 0) or 0), _MANY_LABELS)
    ends_texts = bool(getattr(config, "is_encoder_decoder", False))
    said = [
        f"{kind.__module__}.{kind.__qualname__}",
        labels,
        _meaning("", small.to_dict(), ends_texts),
        sorted(_layer_kinds(config.to_dict())),
        [] if model is None else sorted(_structure(model)),
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _is_stock(kind: type) -> bool:
    """Return whether a class and its ``forward`` are unpatched transformers code."""
    forward = getattr(kind, "forward", None)
    modules = (kind.__module__, getattr(forward, "__module__", None) or "torch")
    return all(name.partition(".")[0] in _STOCK for name in modules)


def _meaning(name: str, value: Any, ends_texts: bool) -> Any:
    """Return a config field without the parts that change no answer."""
    if isinstance(value, dict):
        return {
            str(key): _meaning(str(key), each, ends_texts)
            for key, each in value.items()
            if key not in _UNREAD and (ends_texts or key != "eos_token_id")  # which only ends what is generated
        }
    if isinstance(value, (list, tuple)):
        each = [_meaning(name, item, ends_texts) for item in value]
        return sorted(set(each)) if value and all(isinstance(item, float) for item in value) else each
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return _number(name, value)


def _number(name: str, value: int | float) -> int | str:
    """Return a size unchanged, and the sign (0 or 1) of a number that only scales."""
    if name.endswith("_token_id") and value not in _TRIED:
        return "unused token"
    if isinstance(value, int) and name not in _SCALES:
        return value
    return str(float(value)) if value in (0, 1) else "positive" if value > 0 else "negative"


def _layer_kinds(fields: dict[str, Any]) -> Iterator[str]:
    """Yield each per-layer list as its kinds in order of appearance, and its last entry."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _layer_kinds(value)
        elif name in PER_LAYER and isinstance(value, (list, tuple)) and value:
            kinds = list(dict.fromkeys(map(repr, value)))
            yield f"{name}: {', '.join(kinds)}; {value[-1]!r}"


def _structure(model: nn.Module) -> set[str]:
    """Return the classes of all modules and the names of tied tensors, with layer indices as wildcards."""
    found = {f"{wild_name(name)}: {type(module).__name__}" for name, module in model.named_modules()}
    firsts: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(parameter), name)
        if first != name:
            found.add(f"{wild_name(name)} is {wild_name(first)}")
    return found
