"""Layers that a feature appends to the layers of a stock model, and the names of their tensors in a checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..torch import own_modules

_T = TypeVar("_T")


@dataclass(frozen=True)
class AddedLayers:
    """Describe the layers that a feature adds to a stock model. They are the list ``layers`` of a new child module of
    the model, whose ``embed_tokens`` is a second reference to the model's embedding (which may be on another pipeline
    stage).
    """

    name: str  # name of the child module
    words: str  # description of the layers, for messages
    option: str  # field of ``Options`` that adds them, unless it is ``None``
    decoder: str  # in each layer, the name of its decoder layer of the model's class
    add: Callable[[Any], None]  # adds the layers to a new stock model, on the meta device

    @property
    def lookup(self) -> str:
        """The name of the embedding in the model."""
        return f"{self.name}.embed_tokens"


class StoredNames:
    """Rename a model's tensors to their names in the checkpoint. ``prefixes`` maps a prefix of names in the model to
    the prefix in the checkpoint. ``copies`` lists, by name in the model, the further names under which the checkpoint
    stores the same tensor, such as ``layers.61.shared_head.head.weight``.
    """

    def __init__(self, prefixes: dict[str, str]) -> None:
        self.prefixes = prefixes
        self.copies: dict[str, list[str]] = {}

    def stored_keys(self, tensors: Mapping[str, _T]) -> dict[str, _T]:
        """Return the tensors by their names in the checkpoint."""
        stored: dict[str, _T] = {}
        for name, tensor in tensors.items():
            ours = next((prefix for prefix in self.prefixes if name.startswith(prefix)), "")
            stored[self.prefixes.get(ours, "") + name.removeprefix(ours)] = tensor
            stored |= dict.fromkeys(self.copies.get(name, ()), tensor)
        return stored

    def read(self, model: Any, keys: Iterable[str]) -> dict[str, str | None]:
        """Map each checkpoint key of the added layers to the name of its tensor in the model, or to ``None`` if the
        checkpoint stores a copy of another tensor under this key. Names are those before conversions (stacking experts,
        for example). Record the prefixes of the checkpoint's names. Without added layers, the map is empty.
        """
        return {}


def added_layers(model: Any) -> AddedLayers | None:
    """Return the description of the layers that a feature added to a model; ``None`` if no layers were added."""
    return _noted(model)[0]


def added_decoders(model: Any) -> dict[str, str]:
    """Map each added layer, in order, to the module inside of it that has the class of the model's own layers."""
    added = added_layers(model)
    if added is None:
        return {}
    path = f"{added.name}.layers"
    layers = [f"{path}.{depth}" for depth in range(len(model.get_submodule(path)))]
    return {layer: f"{layer}.{added.decoder}" for layer in layers}


def stored_names(model: Any) -> StoredNames:
    """Return the object that renames a model's tensors to their names in its checkpoint."""
    return _noted(model)[1]


@contextmanager
def without_added(model: Any) -> Iterator[None]:
    """Remove the added layers from a model inside the ``with`` block, so that only its class's own layers are left."""
    added = added_layers(model)
    child = None if added is None else own_modules(model).pop(added.name, None)
    try:
        yield
    finally:
        if added is not None and child is not None:
            model.add_module(added.name, child)


def _noted(model: Any) -> tuple[AddedLayers | None, StoredNames]:
    return vars(model).get("_hfscale_added") or (None, StoredNames({}))
