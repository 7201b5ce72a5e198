"""What the host writes: names and shapes of stored tensors, and configs."""

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save

from ...errors import CheckpointError
from .classes import class_name, empty_copy, stock_class


def as_stored(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One parameter as a plain Hugging Face checkpoint of this model holds it: under its stored name, or as the several
    tensors that the host fuses on load. Works on the meta device too.
    """
    reverted: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return reverted


def never_stored(model: Any) -> set[str]:
    """Names of tensors that the host's ``save_pretrained`` leaves out, since it makes them itself."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def stored_layout(model: Any, contents: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a plain checkpoint of this model, on the meta device; ``contents`` are the model's own.

    Raises:
        CheckpointError: the host stores several parameters as one, which cannot be written one at a time.
    """
    _note_conversions(model)
    together: dict[str, Tensor] = revert_weight_conversion(model, contents)
    apart: dict[str, Tensor] = {}
    for name, tensor in contents.items():
        apart.update(as_stored(model, name, tensor))
    if {name: t.shape for name, t in together.items()} != {name: t.shape for name, t in apart.items()}:
        odd = sorted(set(together) ^ set(apart))
        raise CheckpointError(
            f"the host stores several parameters of {class_name(model)} as one ({', '.join(odd[:4])}), which this "
            "version cannot write: save the model with one process"
        )
    return apart


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
