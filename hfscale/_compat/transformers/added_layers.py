"""Layers that a feature adds behind those of a stock model, and the names of their tensors in a checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..torch import own_modules

_T = TypeVar("_T")


@dataclass(frozen=True)
class AddedLayers:
    """Declare a child of the model, with ``layers``, and with ``embed_tokens``: the model's embedding once more, which
    may be on another pipeline stage.
    """

    name: str  # of the child
    words: str  # what the layers are
    option: str  # the field of ``Options`` that asks for them by any value but ``None``
    decoder: str  # in each of the layers, the module of the class of the model's own
    add: Callable[[Any], None]  # adds them to a new stock model, on the meta device

    @property
    def lookup(self) -> str:
        """The name of the embedding."""
        return f"{self.name}.embed_tokens"


class StoredNames:
    """Name tensors as a checkpoint does: ``prefixes`` maps those in the model to those in the checkpoint, and
    ``copies`` a tensor of the model to its other names there, as ``layers.61.shared_head.head.weight``.
    """

    def __init__(self, prefixes: dict[str, str]) -> None:
        self.prefixes = prefixes
        self.copies: dict[str, list[str]] = {}

    def stored_keys(self, tensors: Mapping[str, _T]) -> dict[str, _T]:
        """Return tensors by their names in the checkpoint."""
        stored: dict[str, _T] = {}
        for name, tensor in tensors.items():
            ours = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
            stored[self.prefixes.get(ours, "") + name.removeprefix(ours)] = tensor
            stored |= dict.fromkeys(self.copies.get(name, ()), tensor)
        return stored

    def read(self, model: Any, keys: Iterable[str]) -> dict[str, str | None]:
        """Return stored key -> name in the model of a checkpoint's tensors of added layers, before the conversions of
        experts and the like, or ``None`` for a copy of another tensor; remember the checkpoint's prefixes. Without
        added layers there are none.
        """
        return {}


def added_layers(model: Any) -> AddedLayers | None:
    """Return the declaration of the layers that were added to a model; ``None`` without any."""
    return _noted(model)[0]


def added_decoders(model: Any) -> dict[str, str]:
    """Return added layer -> the module in it of the class of the model's own layers, in order."""
    added = added_layers(model)
    if added is None:
        return {}
    path = f"{added.name}.layers"
    layers = [f"{path}.{depth}" for depth in range(len(model.get_submodule(path)))]
    return {layer: f"{layer}.{added.decoder}" for layer in layers}


def stored_names(model: Any) -> StoredNames:
    """Return what tensors of a model are called in its checkpoint."""
    return _noted(model)[1]


@contextmanager
def without_added(model: Any) -> Iterator[None]:
    """Take the added layers out of a model inside the ``with`` block, so that it is what its class builds."""
    added = added_layers(model)
    child = None if added is None else own_modules(model).pop(added.name, None)
    try:
        yield
    finally:
        if added is not None and child is not None:
            model.add_module(added.name, child)


def _noted(model: Any) -> tuple[AddedLayers | None, StoredNames]:
    return vars(model).get("_hfscale_added") or (None, StoredNames({}))
