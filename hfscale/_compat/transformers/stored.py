"""Map stored tensors to parameters by transformers' conversions of weights. Map parameters to stored tensors, and write
configs, as transformers saves them.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save
from transformers.quantizers.auto import AutoHfQuantizer

from ...errors import CheckpointError, ConfigError
from ..replaced import attribute_replaced
from .added_layers import stored_names
from .classes import class_name, empty_copy, stock_class


@dataclass(frozen=True)
class Merge:
    """Describe a converter that only stacks or concatenates stored tensors to a parameter. The tensors are in
    transformers' order: by source (gate projection, up projection), and within a source by the numbers in their names
    (``experts.9`` before ``experts.10``).
    """

    source: int  # index of this tensor's source: a gate projection precedes an up projection
    # The new dim along which the tensors of one source are stacked; ``None`` if they are not stacked.
    stack: int | None
    # The dim along which the sources are then concatenated; ``None`` if there is only one source.
    join: int | None


@dataclass(frozen=True)
class Destination:
    """Describe the parameter or buffer that a stored tensor is loaded into, and the conversion on the way."""

    name: str  # name of the (first) parameter or buffer
    converter: WeightConverter | None = None  # the conversion; ``None`` if there is none
    pattern: str = ""  # the source pattern of the converter that the key matched
    others: tuple[str, ...] = ()  # further tensors that the converter makes
    merge: Merge | None = None  # set if the converter only merges tensors


def checkpoint_targets(
    model: Any, keys: list[str], weight_mapping: list[Any]
) -> dict[str, Destination]:
    """Map each stored key to the parameter or buffer that it is loaded into, in transformers' order.

    Also mark the entries of ``weight_mapping`` that these keys use, because transformers applies only marked
    conversions when it saves. ``keys`` are those of all stages, so that a rank that loads one stage can save all
    stages.
    """
    copies = copy.deepcopy(weight_mapping)  # matching also changes other attributes
    result = _destinations(keys, copies, model.base_model_prefix, model.state_dict())
    for entry, copied in zip(weight_mapping, copies, strict=True):
        entry._was_used = entry.was_used() or copied.was_used()
    return result


def loaded_conversions(model: Any) -> list[Any] | None:
    """Return the conversions that transformers recorded when it loaded the model; ``None`` if it recorded none."""
    return getattr(model, "_weight_conversions", None)


def loaded_targets(
    model: Any,
    keys: list[str],
    names: Collection[str],
) -> dict[str, Destination]:
    """Map the keys of the checkpoint that ``model`` was loaded from, or saved to, to destinations among ``names``."""
    used = loaded_conversions(model)
    used = copy.deepcopy(
        get_model_conversion_mapping(model, add_legacy=False) if used is None else used
    )
    return _destinations(keys, used, model.base_model_prefix, dict.fromkeys(names, True))


def _destinations(
    keys: list[str],
    weight_mapping: list[Any],
    prefix: str,
    expected: dict[str, Any],
) -> dict[str, Destination]:
    renamings = [entry for entry in weight_mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in weight_mapping if isinstance(entry, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    result = {}
    # In transformers' order, because the results of some entries depend on the order.
    for key in sorted(keys, key=dot_natural_key):
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
    dims = {
        type(operation): operation.dim
        for operation in converter.operations
        if hasattr(operation, "dim")
    }
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
    """Convert all stored full tensors of one destination like transformers does, in transformers' order; return the
    resulting parameters by name. ``like`` stands in for the model: ``like.get_parameter(name)`` has the shape that a
    converter may ask for.
    """
    first = found[next(iter(tensors))]
    if first.converter is None:
        return {first.name: next(iter(tensors.values()))}
    converter: Any = copy.deepcopy(first.converter)
    for key, tensor in tensors.items():
        converter.add_tensor(first.name, key, found[key].pattern, tensor)
    made = converter.convert(first.name, model=like, config=config)
    return {
        name: made_tensor[0] if isinstance(made_tensor, list) else made_tensor
        for name, made_tensor in made.items()
    }


def never_stored(model: Any) -> set[str]:
    """Return the names of tensors that ``save_pretrained`` leaves out, because the model computes them."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


class AsStored:
    """Convert a model's tensors to those of a plain Hugging Face checkpoint; this works on the meta device too."""

    def __init__(self, model: Any, contents: dict[str, Tensor]) -> None:
        """Take all tensors, ``contents``, on the meta device. Raise :class:`CheckpointError` if converting them group
        by group (tensors that are stored together) does not give transformers' result.
        """
        self._model, self._whole, self._conversions = model, contents, _conversions(model)
        self._names = stored_names(model)
        with self._reverting():
            expected: dict[str, Tensor] = revert_weight_conversion(model, dict(contents))
            # parameter -> its group, all parameters that are stored together, in order; only for groups of two or more
            self.together, renamed = _together(model, contents, self._conversions)
            self.together |= _after_another(model, contents, self.together, set(expected))
        self._renamed = {name: key for name, key in renamed.items() if name not in self.together}
        self._waiting: dict[str, Tensor] = {}
        self.layout: dict[str, Tensor] = {}  # every tensor of the checkpoint, on the meta device
        for name, tensor in contents.items():
            self.layout.update(self.made_of(name, tensor))
        expected = self._names.stored_keys(expected)
        if {name: t.shape for name, t in expected.items()} != {
            name: t.shape for name, t in self.layout.items()
        }:
            odd = sorted(set(expected) ^ set(self.layout))
            raise CheckpointError(
                f"transformers stores several parameters of {class_name(model)} as one tensor ({', '.join(odd[:4])}), "
                "which several ranks cannot write: save the model in one process"
            )

    def made_of(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the stored tensors made of a parameter. For a group of parameters stored together, return all stored
        tensors when the group's last parameter is given, and none before.
        """
        if name in self._renamed:
            return self._names.stored_keys({self._renamed[name]: tensor})
        names = self.together.get(name, (name,))
        self._waiting[name] = tensor
        if any(other not in self._waiting for other in names):
            return {}
        with self._reverting():
            stored: dict[str, Tensor] = revert_weight_conversion(
                self._model, {other: self._waiting.pop(other) for other in names}
            )
        return self._names.stored_keys(stored)

    def again(self) -> "AsStored":
        """Return a new converter of the same tensors that holds no tensors of an unfinished conversion."""
        other = copy.copy(self)
        other._waiting = {}
        return other

    @contextmanager
    def _reverting(self) -> Iterator[None]:
        """Let transformers' reverse conversion run on a model inside the ``with`` block, even if the model holds
        shards: it gets the recorded conversions, and parameters with the shapes of the full tensors.
        """
        model = self._model
        known = self._whole

        def get_parameter(name: str) -> Any:
            return known[name] if name in known else type(model).get_parameter(model, name)

        with (
            attribute_replaced(model, "get_parameter", get_parameter),
            attribute_replaced(model, "_weight_conversions", self._conversions),
        ):
            yield


def _together(
    model: Any, contents: dict[str, Tensor], conversions: list[Any]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return two maps. The first maps each tensor that is converted together with others (stacked experts, for example)
    to the names of all tensors of its group, in order. The second maps each tensor that is only renamed to its stored
    name.
    """
    renamed: dict[str, str] = {}
    converters = [
        entry.reverse_transform()
        for entry in conversions[::-1]
        if isinstance(entry, WeightConverter)
    ]
    known: dict[str, list[str]] = {}
    for name, tensor in contents.items():
        matches = ((entry, *entry.rename_source_key(name)) for entry in converters)
        entry, key, pattern = next(
            (match for match in matches if match[2] is not None), (None, name, None)
        )
        several = entry is not None and len(entry.source_patterns) > 1 and pattern is not None
        keys = (
            [f"{key} of all"] if several else list(revert_weight_conversion(model, {name: tensor}))
        )
        if entry is None and len(keys) == 1:
            renamed[name] = keys[0]
        for stored in keys:
            known.setdefault(stored, []).append(name)
    return {
        name: tuple(names) for names in known.values() if len(names) > 1 for name in names
    }, renamed


def _after_another(
    model: Any,
    contents: dict[str, Tensor],
    known: dict[str, tuple[str, ...]],
    expected: set[str],
) -> dict[str, tuple[str, ...]]:
    """Map pairs of tensors of which transformers renames the second correctly only after the first (``norm1`` after
    ``norm0``, for example): name of each tensor of a pair -> both names, in this order.
    """
    together: dict[str, tuple[str, ...]] = {}
    alone = {name: tensor for name, tensor in contents.items() if name not in known}
    for name, tensor in alone.items():
        if expected.issuperset(revert_weight_conversion(model, {name: tensor})):
            continue
        layer = re.sub(r"(.*\.\d+\.).*", r"\1", name)
        leaf = name.rpartition(".")[2]
        others = (
            other
            for other in alone
            if other.startswith(layer) and other.endswith(f".{leaf}") and other != name
        )
        pairs = ({other: alone[other], name: tensor} for other in others if other not in together)
        pair = next(
            (pair for pair in pairs if expected.issuperset(revert_weight_conversion(model, pair))),
            {},
        )
        together |= dict.fromkeys(pair, tuple(pair))
    return together


def _conversions(model: Any) -> list[Any]:
    """Return the conversions recorded at loading, or else those of the model's class (FSDP2 changes the
    class's name).
    """
    if (loaded := loaded_conversions(model)) is not None:
        return loaded
    own = type(model) is stock_class(model)
    conversions = get_model_conversion_mapping(
        model if own else empty_copy(model), add_legacy=False
    )
    # A change of prefix is known only from loading, as in transformers' own `revert_weight_conversion`.
    conversions = [entry for entry in conversions if type(entry).__name__ != "PrefixChange"]
    if not own:
        model._weight_conversions = conversions or None  # as loading records them
    return conversions


def write_configs(model: Any, directory: Path) -> None:
    """Write ``config.json``, and ``generation_config.json`` for models that generate, like ``save_pretrained``."""
    config = model.config
    config.architectures = [stock_class(model).__name__]
    config.save_pretrained(directory)
    if model.is_remote_code():  # code of a class that came with its checkpoint
        custom_object_save(model, directory, config=config)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)


class Fp8Encoder:
    """Quantize tensors of ``model``, a stock model or a rank's shards of one, to 8-bit floating point with a scale per
    block, like transformers on a GPU. Raise :class:`ConfigError` for any config except ``FineGrainedFP8Config``, and if
    transformers cannot quantize this model.
    """

    def __init__(self, model: Any, config: Any) -> None:
        if not isinstance(config, FineGrainedFP8Config):
            raise ConfigError(
                f"quantization_config must be a transformers.FineGrainedFP8Config, got {type(config).__name__}: "
                "pass one, or leave it out"
            )
        quantizer: Any = AutoHfQuantizer.from_config(copy.deepcopy(config), pre_quantized=False)
        whole = empty_copy(model)
        names = [name for name, _ in whole.named_parameters()]
        try:
            quantizer.preprocess_model(whole)
        except Exception as error:  # of any type, for mixture-of-experts layers that do not fit
            raise ConfigError(
                f"transformers cannot hold {class_name(model)} in 8-bit floating point ({type(error).__name__}: "
                f"{error}): leave quantization_config out"
            ) from error
        self._wanted = {name for name in names if quantizer.param_needs_quantization(whole, name)}
        self._operation = quantizer.get_quantize_ops()

    def wants(self, name: str) -> bool:
        """Return whether transformers would quantize a parameter of the model."""
        return name in self._wanted

    def made_of(self, key: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the quantized tensor as ``key`` and its scales as ``KEY_scale_inv``. Return the tensor unchanged if
        its sizes are no multiples of the block's.
        """
        return self._operation.convert({key: tensor})
