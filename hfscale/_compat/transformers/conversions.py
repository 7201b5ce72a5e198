"""Map stored tensors to parameters by transformers' conversion of weights."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True)
class Merge:
    """Describe a converter that does nothing but concatenate or stack stored tensors, in transformers' order: by
    source, then by the numbers in their names (``experts.9`` before ``experts.10``).
    """

    source: int  # index of this tensor among the converter's sources: a gate projection, say, before an up projection
    stack: int | None  # the new dim along which the tensors of one source are stacked; ``None``: they are not
    join: int | None  # the dim along which the sources are then concatenated; ``None`` for one source


@dataclass(frozen=True)
class Destination:
    """The parameter or buffer that a stored tensor loads into."""

    name: str  # the parameter or buffer; the first, if a converter makes several of it
    converter: WeightConverter | None = None  # the conversion; ``None`` if it loads as it is
    pattern: str = ""  # the one of the converter's sources that its key matched
    others: tuple[str, ...] = ()  # the other tensors that the converter makes of it
    merge: Merge | None = None  # the converter, if it changes neither values nor their order


def checkpoint_targets(model: Any, keys: list[str], weight_mapping: list[Any]) -> dict[str, Destination]:
    """Return stored key -> destination, in transformers' order. Entries of ``weight_mapping`` that these keys use are
    marked as used: transformers saves through those, and a rank with one stage's keys has to save every stage's.
    """
    copies = copy.deepcopy(weight_mapping)  # matching leaves other marks too
    result = _destinations(keys, copies, model.base_model_prefix, model.state_dict())
    for entry, copied in zip(weight_mapping, copies, strict=True):
        entry._was_used = entry.was_used() or copied.was_used()
    return result


def loaded_conversions(model: Any) -> list[Any] | None:
    """Return the conversions that transformers noted as it loaded the model; ``None`` if it noted none."""
    return getattr(model, "_weight_conversions", None)


def loaded_targets(model: Any, keys: list[str], names: Collection[str]) -> dict[str, Destination]:
    """Return the destinations, among ``names``, of the keys of the checkpoint that ``model`` came from or went to."""
    used = loaded_conversions(model)
    used = copy.deepcopy(get_model_conversion_mapping(model, add_legacy=False) if used is None else used)
    return _destinations(keys, used, model.base_model_prefix, dict.fromkeys(names, True))


def _destinations(
    keys: list[str], weight_mapping: list[Any], prefix: str, expected: dict[str, Any]
) -> dict[str, Destination]:
    renamings = [entry for entry in weight_mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in weight_mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    result = {}
    for key in sorted(keys, key=dot_natural_key):  # transformers' order, which some entries depend on
        target, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if target not in expected and key in expected:
            target, pattern = rename_source_key(key, [], [], prefix, expected)
        if pattern is None:
            result[key] = Destination(target)
            continue
        converter = by_pattern[pattern]
        first, *rest = converter.target_patterns
        others = tuple(target.replace(first, other) for other in rest)
        result[key] = Destination(target, converter, pattern, others, _merge(converter, pattern))
    return result


def _merge(converter: WeightConverter, pattern: str) -> Merge | None:
    kinds = [type(operation) for operation in converter.operations]
    dims = {type(operation): operation.dim for operation in converter.operations if hasattr(operation, "dim")}
    sources = converter.source_patterns
    known = kinds in ([Concatenate], [MergeModulelist, Concatenate]) or (
        kinds == [MergeModulelist] and len(sources) < 2
    )
    if not known or len(converter.target_patterns) > 1 or min(dims.values()) < 0:
        return None
    return Merge(sources.index(pattern), dims.get(MergeModulelist), dims.get(Concatenate))


def convert(
    tensors: Mapping[str, Tensor], found: Mapping[str, Destination], like: Any, config: Any
) -> dict[str, Tensor]:
    """Convert all stored full tensors of one destination, in transformers' order, as transformers does; return the
    parameter, or those that the converter makes, by name. ``like`` is a stand-in for the model:
    ``like.get_parameter(name)`` has the shape that a converter may ask for.
    """
    first = found[next(iter(tensors))]
    if first.converter is None:
        return {first.name: next(iter(tensors.values()))}
    converter: Any = copy.deepcopy(first.converter)
    for key, tensor in tensors.items():
        converter.add_tensor(first.name, key, found[key].pattern, tensor)
    made = converter.convert(first.name, model=like, config=config)
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
