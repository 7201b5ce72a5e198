"""Real memory that tensors take, followed at torch's dispatcher."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Bytes of the tensors made while it is on: those alive now, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage.data_ptr() not in given:
                self._follow(storage)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if not size or place in self._known:
            return

        def gone() -> None:
            self.live -= size
            self._known.discard(place)

        self._known.add(place)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, gone)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if (
            isinstance(leaf, Tensor)
            and not isinstance(leaf, DTensor)
            and leaf.device.type != "meta"
        ):
            yield leaf.untyped_storage()


@contextmanager
def follow_memory() -> Iterator[Memory]:
    """Follow what is made within; what dies later still leaves ``live``."""
    with Memory() as memory:
        yield memory
