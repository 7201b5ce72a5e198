"""Count the bytes saved for backward passes by saved-tensor hooks. Each storage counts once; parameters do not
count.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..._compat.peft import wrapped
from ..._compat.torch import own_buffers, own_parameters, storage_key
from ..._compat.transformers.hidden_states import hidden_states_of
from ...train.runtime import find_runtime, local_tensor, memory_of


class _Saved:
    """Hold a saved tensor; autograd frees it with the node that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        # detach: an operation's saved output would otherwise keep the operation's autograd node alive
        self.tensor = tensor.detach()


@dataclass
class SavedBytes:
    """Hold peaks of the bytes saved for backward passes. Each storage counts once; parameters do not count."""

    layers: int = 0  # bytes saved in the layers, with the layers' inputs
    around: int = 0  # bytes saved outside the layers; the loss of stock models saves logits
    head: int = 0  # bytes of gradients of the head that wait for the backward pass
    total: int = 0  # bytes of all kinds together; each kind may peak at another time
    _now: dict[str, int] = field(
        default_factory=lambda: {
            "layers": 0,
            "around": 0,
            "head": 0,
        }
    )

    @property
    def now(self) -> int:
        """The bytes saved at this moment."""
        return sum(self._now.values())

    def add(self, kind: str, size: int) -> None:
        """Record that ``size`` bytes of a ``kind`` (``"layers"``, ``"head"``, or ``"around"`` for all others) are
        saved, or freed if ``size`` is negative.
        """
        self._now[kind] += size
        setattr(self, kind, max(getattr(self, kind), self._now[kind]))
        self.total = max(self.total, self.now)


@contextmanager
def count_saved(
    model: nn.Module, layers: Iterable[str], head: str | None = None
) -> Iterator[SavedBytes]:
    """Count the bytes that forward passes of ``model`` save for backward inside the with block. ``layers`` names the
    layers (layers on other ranks are ignored), and ``head`` names the head.
    """
    saved = SavedBytes()
    with SavedCounter(model, layers, head, saved.add):
        yield saved


class SavedCounter:
    """Count the saved tensors of ``model`` inside a with block, each storage once, without parameters.

    Args:
        layers: names of the layers.
        head: name of the head, if it is on this rank.
        note: called when a storage is saved, with its kind (``"layers"``, ``"head"``, or ``"around"`` for all others)
            and its bytes; called with negative bytes when it is freed.
        copies: keys of further storages that do not count (copies of parameters); may be extended later.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str],
        head: str | None,
        note: Callable[[str, int], None],
        copies: Collection[int] = (),
    ) -> None:
        self._note = note
        self._copies = copies
        self._kept: dict[int, list[Any]] = {}  # storage -> number of saved references, bytes, kind
        # Weak references keep the addresses from being reused by other storages.
        self._parameters: dict[int, StorageWeakRef] = {}
        self._depth = 0
        self._handles: list[Any] = []
        modules = dict(model.named_modules())
        head_module = modules.get(head) if head is not None else None
        weight = None if head_module is None else next(head_module.parameters(recurse=False), None)
        # Shape of the head's weight after this weight is gathered over the data ranks.
        self.head_shape = () if weight is None else tuple(weight.shape)
        # No hooks on modules inside an adapter's wrapper: with such a hook, PEFT's own code would run.
        inside = {
            inner
            for module in modules.values()
            if wrapped(module) is not None
            for inner in module.modules()
            if inner is not module
        }
        for module in modules.values():
            if module not in inside:
                self._handles.append(module.register_forward_pre_hook(self._note_all))
        names = [name for name in layers if name in modules]
        runtime = find_runtime(model)
        for name, behind in zip_longest(names, names[1:]):
            layer = modules[name]
            self._handles.append(layer.register_forward_pre_hook(self.enter, with_kwargs=True))
            if behind is not None and runtime is not None and not runtime.is_local(behind):
                self._handles.append(layer.register_forward_hook(self._send))
            self._handles.append(layer.register_forward_hook(self.leave, always_call=True))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self.unpack)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)
        for handle in self._handles:
            handle.remove()

    def kind_of(self, tensor: Tensor) -> str:
        """Return the kind of ``tensor``, which is being saved: ``"layers"`` inside a layer; elsewhere ``"head"`` if the
        tensor has the shape of the head's weight, else ``"around"``.
        """
        return "layers" if self._depth else "head" if self.is_of_head(tensor) else "around"

    def is_of_head(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the shape of the head's weight."""
        return tuple(tensor.shape) == self.head_shape != ()

    def saved_as(self, key: int) -> str | None:
        """Return the kind of the saved storage ``key``; ``None`` if it is not counted."""
        return str(self._kept[key][2]) if key in self._kept else None

    def freed(self, key: int) -> None:
        """Do nothing; subclasses override this method to handle a storage that is no longer saved."""

    def unpack(self, saved: _Saved) -> Tensor:
        """Return a saved tensor to the backward pass."""
        return saved.tensor

    def _note_parameters(self, module: nn.Module) -> None:
        # While FSDP2 has gathered weights, the parameters are the full weights.
        for parameter in (*own_parameters(module).values(), *own_buffers(module).values()):
            for plain in [] if parameter is None else memory_of(parameter.detach()):
                storage = plain.untyped_storage()
                self._parameters.setdefault(storage_key(storage), StorageWeakRef(storage))

    def _note_all(self, module: nn.Module, _: Any) -> None:
        """Record the parameters of a module; for an adapter's wrapper, also those of the modules inside it."""
        for held in [module] if wrapped(module) is None else module.modules():
            self._note_parameters(held)

    def enter(
        self,
        layer: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        """Record that a layer's forward begins, and count the layer's input."""
        self._depth += 1
        # an adapter reads the weights of the module that it wraps without calling the module
        for module in layer.modules():
            self._note_parameters(module)
        stream = hidden_states_of(args, kwargs)
        if isinstance(stream, Tensor) and stream.requires_grad:
            self._count(stream)  # recomputation saves the input outside of these hooks

    def _send(self, _: nn.Module, given: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        if isinstance(stream, Tensor) and stream.requires_grad:
            self._count(stream)  # sent to the next stage, and kept until the gradient arrives

    def leave(self, *_: Any) -> None:
        """Record that a layer's forward ends."""
        self._depth -= 1

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        key = self._count(tensor, saved)
        if key is not None:
            weakref.finalize(saved, self._free, key)
        return saved

    def _count(self, tensor: Tensor, saved: _Saved | None = None) -> int | None:
        storage = local_tensor(tensor.detach()).untyped_storage()
        key = storage_key(storage)
        if key in self._parameters or key in self._copies:
            return None
        if key not in self._kept:
            kind = self.kind_of(tensor)
            self._kept[key] = [0, storage.nbytes(), kind]
            self._note(kind, storage.nbytes())
        self._kept[key][0] += 1
        if saved is None:  # counted as long as the tensor is alive
            weakref.finalize(tensor, self._free, key)
        return key

    def _free(self, key: int) -> None:
        kept = self._kept[key]
        kept[0] -= 1
        if not kept[0]:
            del self._kept[key]
            self._note(kept[2], -kept[1])
            self.freed(key)
