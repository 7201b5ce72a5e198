"""Choose the form in which a checkpoint's weights are written: plain, or one that an extension adds."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigError
from ..extensions import added, provided
from .coverage import carried_by
from .stored_forms.scheme import StoredForm, form_in


class PlainForm:
    """Write a model's tensors as they are; an extension's subclass quantizes them again."""

    form: StoredForm | None = None  # the quantization format of the written tensors

    def layout(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        """Return the shape and dtype of every tensor that a save writes for ``plain``, dequantized tensors by name. For
        tensors of a checkpoint that a save copies, return the tensors to copy.
        """
        return dict(plain)

    def made_of(self, key: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return, by name, the tensors that a save writes for the model's tensor ``key``."""
        return {key: tensor}


def written_form(name: str | None, model: nn.Module) -> PlainForm:
    """Return how the tensors of ``model`` are written: in the form ``name`` of an extension, or as they are if ``name``
    is ``None``. Raise :class:`ConfigError` if there is no such form, or if the model was not loaded from a quantized
    checkpoint that still exists.
    """
    if name is None:
        return PlainForm()
    if str(name) not in (known := added("written_forms")):
        raise ConfigError(
            f"quantization must be {' or '.join(map(repr, (*known, None)))}, got {name!r}: pass one of these, or leave "
            "quantization out"
        )
    source = carried_by(model)
    form = form_in(source.directory) if source else None
    if not source or not form:
        raise ConfigError(
            f"the option {name!r} needs the quantized checkpoint that the model was loaded from, but "
            f"{source.directory if source else 'it'} does not store quantized weights: leave this option out"
        )
    written: PlainForm = provided("written_forms", name)(source.directory, form)
    return written
