"""What the host writes: names and shapes of stored tensors, and configs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from ...errors import CheckpointError
from .classes import class_name, empty_copy, stock_class


def never_stored(model: Any) -> set[str]:
    """Names of tensors that the host's ``save_pretrained`` leaves out, since it makes them itself."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


class AsStored:
    """Makes the tensors of a plain Hugging Face checkpoint of a model's own: under their stored names, as the several
    tensors that the host fuses on load, or as the one that it takes apart. Works on the meta device too.

    Attributes:
        layout: every tensor of the checkpoint, on the meta device.
    """

    def __init__(self, model: Any, contents: dict[str, Tensor]) -> None:
        """Take the model's own tensors, on the meta device.

        Raises:
            CheckpointError: the host makes others of all together than of those that belong together.
        """
        _note_conversions(model)
        self._model, self._whole = model, contents
        with _whole_shapes(model, contents):
            expected: dict[str, Tensor] = revert_weight_conversion(model, dict(contents))
            self._together = _together(model, contents)
            self._together |= _after_another(model, contents, self._together, set(expected))
        self._waiting: dict[str, Tensor] = {}
        self.layout: dict[str, Tensor] = {}
        for name, tensor in contents.items():
            self.layout.update(self.made_of(name, tensor))
        if {name: t.shape for name, t in expected.items()} != {name: t.shape for name, t in self.layout.items()}:
            odd = sorted(set(expected) ^ set(self.layout))
            raise CheckpointError(
                f"the host stores several parameters of {class_name(model)} as one ({', '.join(odd[:4])}), which this "
                "version cannot write: save the model with one process"
            )

    def made_of(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """What the checkpoint holds of one tensor; nothing, until the last of those comes that are stored as one."""
        names = self._together.get(name, (name,))
        self._waiting[name] = tensor
        if any(other not in self._waiting for other in names):
            return {}
        with _whole_shapes(self._model, self._whole):
            stored: dict[str, Tensor] = revert_weight_conversion(
                self._model, {other: self._waiting.pop(other) for other in names}
            )
        return stored


@contextmanager
def _whole_shapes(model: Any, contents: dict[str, Tensor]) -> Iterator[None]:
    """Within: the host is shown whole parameters where it asks the model for their shapes, to see whether it has to
    transpose a tensor; a rank's own may be shares.
    """
    known = dict(contents)
    model.get_parameter = lambda name: known[name] if name in known else type(model).get_parameter(model, name)
    try:
        yield
    finally:
        del model.get_parameter


def _together(model: Any, contents: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Name -> those that it is stored together with, itself among them, in order.

    The host says which: by themselves they get one name, or a converter of several patterns gives them one key (two
    mixtures of a layer that are stored as one list of experts; by themselves it refuses them).
    """
    mapping = getattr(model, "_weight_conversions", None)
    mapping = get_model_conversion_mapping(model, add_legacy=False) if mapping is None else mapping
    converters = [entry.reverse_transform() for entry in mapping[::-1] if isinstance(entry, WeightConverter)]
    known: dict[str, list[str]] = {}
    for name, tensor in contents.items():
        found = ((entry, *entry.rename_source_key(name)) for entry in converters)
        entry, key, pattern = next((match for match in found if match[2] is not None), (None, name, None))
        several = entry is not None and len(entry.source_patterns) > 1 and pattern is not None
        for stored in [f"{key} of all"] if several else revert_weight_conversion(model, {name: tensor}):
            known.setdefault(stored, []).append(name)
    return {name: tuple(names) for names in known.values() if len(names) > 1 for name in names}


def _after_another(
    model: Any, contents: dict[str, Tensor], known: dict[str, tuple[str, ...]], expected: set[str]
) -> dict[str, tuple[str, ...]]:
    """The same of those that the host renames where it has seen another one of their layer before, and not alone (what
    is stored as ``norm0`` and ``norm1``, and is ``norm1`` and ``norm2`` here).
    """
    found: dict[str, tuple[str, ...]] = {}
    alone = {name: tensor for name, tensor in contents.items() if name not in known}
    for name, tensor in alone.items():
        if expected.issuperset(revert_weight_conversion(model, {name: tensor})):
            continue
        layer, leaf = re.sub(r"(.*\.\d+\.).*", r"\1", name), name.rpartition(".")[2]
        others = (other for other in alone if other.startswith(layer) and other.endswith(f".{leaf}") and other != name)
        pairs = ({other: alone[other], name: tensor} for other in others if other not in found)
        pair = next((pair for pair in pairs if expected.issuperset(revert_weight_conversion(model, pair))), {})
        found |= dict.fromkeys(pair, tuple(pair))
    return found


def stored_layout(model: Any, contents: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a plain checkpoint of this model, on the meta device; ``contents`` are the model's own.

    Raises:
        CheckpointError: as :class:`AsStored`.
    """
    return AsStored(model, contents).layout


def _note_conversions(model: Any) -> None:
    """What loading notes for saving, where nothing was loaded: the host would look it up under the name of the class,
    and FSDP2 gives the model a class of another name.
    """
    if getattr(model, "_weight_conversions", None) is None and type(model) is not stock_class(model):
        found = get_model_conversion_mapping(empty_copy(model), add_legacy=False)
        # A prefix is known from loading only, as in the host's own `revert_weight_conversion`.
        model._weight_conversions = [entry for entry in found if type(entry).__name__ != "PrefixChange"] or None


def write_configs(model: Any, directory: Path) -> None:
    """Write ``config.json`` and, for models that generate, ``generation_config.json``, as ``save_pretrained`` would."""
    config = model.config
    config.architectures = [stock_class(model).__name__]
    config.save_pretrained(directory)
    if getattr(model, "_auto_class", None) is not None:  # the code of a class that came with its checkpoint
        custom_object_save(model, directory, config=config)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(directory)
