"""Count the bytes saved for backward passes, by saved-tensor hooks: each storage once, without parameters."""

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
        self.tensor = tensor.detach()  # a saved output would otherwise keep its own node alive


@dataclass
class SavedBytes:
    """Peak bytes saved for backward passes, each storage once, without parameters."""

    layers: int = 0  # saved in the layers, with their inputs
    around: int = 0  # saved outside of them; the loss of stock models saves logits
    head: int = 0  # gradients of the head that wait for the backward pass
    total: int = 0  # of all kinds together; each kind may peak at another time
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
        """Record that ``size`` bytes of a kind are saved or, if negative, freed."""
        self._now[kind] += size
        setattr(self, kind, max(getattr(self, kind), self._now[kind]))
        self.total = max(self.total, self.now)


@contextmanager
def count_saved(
    model: nn.Module, layers: Iterable[str], head: str | None = None
) -> Iterator[SavedBytes]:
    """Count the bytes that passes of ``model`` save in the with block, by ``layers`` (of this rank) and ``head``."""
    saved = SavedBytes()
    with SavedCounter(model, layers, head, saved.add):
        yield saved


class SavedCounter:
    """A context that counts the saved tensors of ``model``, each storage once, without parameters and their ``copies``,
    storage keys that may be added later; ``note`` is told the kind and the bytes saved or, if negative, freed.
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
        self._kept: dict[int, list[Any]] = {}  # storage -> how often it is saved, bytes, kind
        self._parameters: dict[
            int, StorageWeakRef
        ] = {}  # referenced, so that no other storage reuses an address
        self._depth = 0
        self._handles: list[Any] = []
        modules = dict(model.named_modules())
        head_module = modules.get(head) if head is not None else None
        weight = None if head_module is None else next(head_module.parameters(recurse=False), None)
        # Gathered over the data ranks.
        self.head_shape = () if weight is None else tuple(weight.shape)
        # A hook inside of an adapter's wrapper would let its own code run.
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
        """Return the kind of a tensor that is saved now."""
        return "layers" if self._depth else "head" if self.is_of_head(tensor) else "around"

    def is_of_head(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the shape of the head's weight."""
        return tuple(tensor.shape) == self.head_shape != ()

    def saved_as(self, key: int) -> str | None:
        """Return the kind of a saved storage; ``None`` for a parameter's."""
        return str(self._kept[key][2]) if key in self._kept else None

    def freed(self, key: int) -> None:
        """React to a storage that is no longer saved."""

    def unpack(self, saved: _Saved) -> Tensor:
        """Return a saved tensor to the backward pass."""
        return saved.tensor

    def _note_parameters(self, module: nn.Module, _: Any) -> None:
        # While FSDP2 has gathered weights, these are the full ones.
        for parameter in (*own_parameters(module).values(), *own_buffers(module).values()):
            for plain in [] if parameter is None else memory_of(parameter.detach()):
                storage = plain.untyped_storage()
                self._parameters.setdefault(storage_key(storage), StorageWeakRef(storage))

    def _note_all(self, module: nn.Module, _: Any) -> None:
        """Note what a module holds, and what a wrapper reads of the modules inside of it."""
        for held in [module] if wrapped(module) is None else module.modules():
            self._note_parameters(held, None)

    def enter(
        self,
        layer: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> None:
        """Record that a layer begins, and count its input."""
        self._depth += 1
        for (
            module
        ) in layer.modules():  # an adapter reads the weights of what it wraps without calling it
            self._note_parameters(module, None)
        stream = hidden_states_of(args, kwargs)
        if isinstance(stream, Tensor) and stream.requires_grad:
            self._count(stream)  # recomputation saves it where the hooks do not see it

    def _send(self, _: nn.Module, given: Any, output: Any) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        if isinstance(stream, Tensor) and stream.requires_grad:
            self._count(stream)  # sent to the next stage; kept until its gradient arrives

    def leave(self, *_: Any) -> None:
        """Record that a layer is done."""
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
