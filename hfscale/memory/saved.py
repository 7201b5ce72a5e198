"""What is kept for backward passes, seen by saved-tensor hooks: each piece of memory once, without parameters."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .._host.torch import own_buffers, own_parameters, storage_key
from .._host.transformers.hidden_states import hidden_states_of
from ..runtime import find_runtime, local_tensor, memory_of


class _Saved:
    """Holds a tensor for autograd, which lets go of it with the node that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output that is saved would else keep the node that keeps it


@dataclass
class SavedBytes:
    """The most bytes that were kept for backward passes at once, each piece of memory once, without parameters.

    Attributes:
        layers: what the layers kept, and their inputs.
        around: what was kept outside of them; the loss of stock models keeps logits.
        head: gradients of the head that wait for the backward pass.
        total: of all of it; the kinds may reach their most at different times.
    """

    layers: int = 0
    around: int = 0
    head: int = 0
    total: int = 0
    _now: dict[str, int] = field(default_factory=lambda: {"layers": 0, "around": 0, "head": 0})

    @property
    def now(self) -> int:
        """What is kept at this moment."""
        return sum(self._now.values())

    def add(self, kind: str, size: int) -> None:
        """Note that so many bytes of a kind are saved, or, if negative, given up."""
        self._now[kind] += size
        setattr(self, kind, max(getattr(self, kind), self._now[kind]))
        self.total = max(self.total, sum(self._now.values()))


@contextmanager
def count_saved(model: nn.Module, layers: Iterable[str], head: str | None = None) -> Iterator[SavedBytes]:
    """Within: forward and backward passes of ``model`` are counted.

    Args:
        layers: names of the layers; those that this rank does not hold are passed over.
        head: name of the projection onto the vocabulary.
    """
    found = SavedBytes()
    with SavedCounter(model, layers, head, found.add):
        yield found


class SavedCounter:
    """Within: saved tensors of ``model`` are counted, each piece of memory once, without parameters.

    Args:
        layers: names of the layers; those that this rank does not hold are passed over.
        head: name of the projection onto the vocabulary.
        note: told the kind, and how many bytes more are kept, or, if negative, fewer.
        copies: keys of the memory of copies of weights, which are not counted either; they may come later.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str],
        head: str | None,
        note: Callable[[str, int], None],
        copies: Collection[int] = (),
    ) -> None:
        self._note, self._copies = note, copies
        self._kept: dict[int, list[Any]] = {}  # storage -> how often it is saved, bytes, kind
        self._parameters: dict[int, StorageWeakRef] = {}  # alive, so that no other storage takes an address
        self._depth = 0
        self._handles: list[Any] = []
        modules = dict(model.named_modules())
        found = modules.get(head) if head is not None else None
        weight = None if found is None else next(found.parameters(recurse=False), None)
        self._head = None if weight is None else tuple(weight.shape)  # as the data ranks gather it
        for module in modules.values():
            self._handles.append(module.register_forward_pre_hook(self._note_parameters))
        names, runtime = [name for name in layers if name in modules], find_runtime(model)
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
        """Of what kind a tensor is that is saved now."""
        return "layers" if self._depth else "head" if self.is_of_head(tensor) else "around"

    def is_of_head(self, tensor: Tensor) -> bool:
        """Whether it is as large as the head's weight."""
        return tuple(tensor.shape) == self._head

    def saved_as(self, key: int) -> str | None:
        """Of what kind a storage is that was saved; ``None`` of a parameter's."""
        return str(self._kept[key][2]) if key in self._kept else None

    def freed(self, key: int) -> None:
        """A storage is kept no more."""

    def unpack(self, saved: _Saved) -> Tensor:
        """What the backward pass is given."""
        return saved.tensor

    def _note_parameters(self, module: nn.Module, _: Any) -> None:
        # While data ranks have weights gathered, these are the whole ones.
        for parameter in (*own_parameters(module).values(), *own_buffers(module).values()):
            for plain in [] if parameter is None else memory_of(parameter.detach()):
                storage = plain.untyped_storage()
                self._parameters.setdefault(storage_key(storage), StorageWeakRef(storage))

    def enter(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A layer begins."""
        self._depth += 1
        for module in layer.modules():  # an adapter reads the weights of what it wraps without calling it
            self._note_parameters(module, None)
        stream = hidden_states_of(args, kwargs)
        if isinstance(stream, Tensor) and stream.requires_grad:
            self._count(stream)  # what recomputes a layer keeps it out of sight of the hooks

    def _send(self, _: nn.Module, given: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        if isinstance(stream, Tensor) and stream.requires_grad:
            self._count(stream)  # it stays until its gradient is back

    def leave(self, *_: Any) -> None:
        """A layer is done."""
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
        if saved is None:  # as long as the tensor is alive
            weakref.finalize(tensor, self._free, key)
        return key

    def _free(self, key: int) -> None:
        kept = self._kept[key]
        kept[0] -= 1
        if not kept[0]:
            del self._kept[key]
            self._note(kept[2], -kept[1])
            self.freed(key)
