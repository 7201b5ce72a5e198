"""Note which contents of a checkpoint the stock class does not load, as of draft layers; :mod:`.copied` copies them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .._compat.transformers.classes import class_name


@dataclass(frozen=True)
class Carried:
    """Name the checkpoint in ``directory`` and its tensors that the model does not load, as if none were quantized."""

    directory: Path
    names: frozenset[str]


def note_carried(model: Any, directory: Path, names: Iterable[str]) -> None:
    """Record which tensors of its checkpoint a new model does not load."""
    # Of a head that another class has replaced, nothing is copied.
    own = class_name(model) in (model.config.architectures or ())
    model._hfscale_carried = Carried(directory, frozenset(names if own else ()))


def carried_by(model: nn.Module) -> Carried | None:
    """Return what :func:`note_carried` recorded on a model, or ``None``."""
    return vars(model).get("_hfscale_carried")
