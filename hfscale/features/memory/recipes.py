"""Recipes of memory: the operator that filled it, what that read, and what is kept of it until the backward pass."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..._compat.torch import living_storage, tree_leaves, tree_map, without_autocast
from ..._compat.torch_device import fork_random_state
from ...parallel.tensor.random import default_generator

_SMALL = 64


class Layout(NamedTuple):
    """The place of a tensor within its memory."""

    size: Any
    stride: Any
    offset: Any
    dtype: torch.dtype

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> "Layout":
        """Return the place of a tensor."""
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def in_storage(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor at this place, without a graph."""
        size, stride, offset, dtype = self
        return torch.empty(0, dtype=dtype, device=storage.device).set_(
            storage, offset, size, stride
        )

    def within(self, whole: Tensor, base: "Layout") -> Tensor:
        """Return the tensor at this place in the memory of ``whole``, which has been at ``base``."""
        if self == base:
            return whole
        begin = whole.storage_offset() * base.dtype.itemsize
        begin += self.offset * self.dtype.itemsize - base.offset * base.dtype.itemsize
        return self._replace(offset=begin // self.dtype.itemsize).in_storage(
            whole.untyped_storage()
        )


class Filled:
    """Memory as one operator has filled it: how to fill it again, what is kept of it, and its value meanwhile."""

    def __init__(
        self, tensor: Tensor, operator: "Operator | None" = None, given: bool = False
    ) -> None:
        storage = tensor.untyped_storage()
        self.layout = Layout.of_tensor(tensor)
        self.operator = operator
        self.given = given
        self.kept: Callable[[], Tensor] | None = None
        self.rewritten = False  # whether the same memory was kept with another content before
        self.saved = 0  # saved tensors that are views of it and have not been read
        # the bytes of the largest memory on the way to it
        self.widest: int = max(storage.nbytes(), 0 if operator is None else operator.widest)
        self.waiting = 0  # saved tensors for which it may be read and that have not been
        self.value: Tensor | None = None
        self._size, self._storage = storage.nbytes(), StorageWeakRef(storage)
        self._overwritten = False

    def now(self) -> Tensor | None:
        """Return the memory as a tensor of its own, without a graph; ``None`` if it is gone or overwritten."""
        storage = None if self._overwritten else living_storage(self._storage)
        return None if storage is None else self.layout.in_storage(storage)

    def before_writing(self, keep: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        """Keep a copy of memory that is about to be overwritten, if anything counts on its content."""
        now = self.now() if self.kept is not None else None
        self.kept = self.kept if now is None else keep(now.clone())
        self._overwritten = True
        self.given = False

    def made_of(self) -> "list[Filled]":
        """Return what its operator reads."""
        return [] if self.operator is None else self.operator.inputs

    def own_cost(self) -> float:
        """Return the bytes that keeping it takes."""
        return (
            self._size
            if not self._overwritten and living_storage(self._storage) is not None
            else inf
        )

    def is_small(self) -> bool:
        """Return whether keeping it takes next to nothing beside what is read to have it again, as a norm's scales."""
        return self.own_cost() * _SMALL <= self.widest

    def cost(self, known: dict["Filled", float]) -> float:
        """Return the fewest bytes that must be kept besides those that are, to have it again."""
        if self.kept is not None or self.given:
            return 0.0
        if self not in known:
            known[self] = self.own_cost()
            if self.operator is not None:
                known[self] = min(
                    known[self],
                    sum(each.cost(known) for each in self.made_of()),
                )
        return known[self]

    def read(self, uses: Counter["Filled"]) -> Tensor:
        """Return its value; compute it if need be. ``uses``: how often that will still read each on the way to it."""
        if self.value is None and self.kept is not None:
            self.value = self.kept()
            if self.value.stride() != self.layout.stride:  # views count on it
                self.value = _empty(self.layout, self.value.device).copy_(self.value)
        if self.value is None and self.operator is not None:
            self.operator.run(uses)
        assert self.value is not None
        return self.value

    def free(self) -> None:
        """Drop its value, unless a saved tensor is a view of it; what is kept can be read only once."""
        # With retain_graph all may be read again.
        if self.waiting <= 0 or (self.kept is None and self.saved <= 0):
            self.value = None


class Read(NamedTuple):
    """An argument of an operator: a tensor at a place of some memory."""

    filled: Filled | None  # ``None``: the tensor that the operator writes into
    layout: Layout


class Operator:
    """An operator as it was called, ``given`` positional and keyword arguments with :class:`Read` in place of tensors;
    ``draws`` says whether it draws random numbers, ``into`` what it writes into, or the place that it overwrites.
    """

    def __init__(
        self,
        func: Any,
        given: Any,
        device: torch.device,
        draws: bool,
        into: Filled | Layout | None,
    ) -> None:
        self._func = func
        self._given = given
        self._device = device
        self._into = into
        self._state = (
            default_generator(device).get_state() if draws and device.type != "meta" else None
        )
        reads = [leaf for leaf in tree_leaves(given, is_leaf=_is_read) if _is_read(leaf)]
        self.inputs: list[Filled] = [leaf.filled for leaf in reads if leaf.filled is not None]
        self.inputs += [into] if isinstance(into, Filled) else []
        repeated = (leaf.operator for leaf in self.inputs if leaf.kept is None)
        self.widest: int = max((each.widest for each in self.inputs), default=0)
        # In a row.
        self.steps: int = 1 + max((leaf.steps for leaf in repeated if leaf is not None), default=0)
        self._results: list[weakref.ref[Filled] | None] = []

    def fills(self, results: Sequence[Filled | None]) -> None:
        """Record what it has filled, in the order of its results."""
        self._results = [None if result is None else weakref.ref(result) for result in results]

    def run(self, uses: Counter[Filled]) -> None:
        """Call it again, set the value of all that it fills, and free what nothing else reads."""
        whole = None
        base = self._into
        if isinstance(base, Filled):
            whole = base.read(uses).clone()
            base = base.layout
        elif base is not None:
            whole = _empty(base, self._device)

        def tensor_of(each: Any) -> Any:
            if not _is_read(each):
                return each
            of, at = (
                (whole, base)
                if each.filled is None
                else (each.filled.read(uses), each.filled.layout)
            )
            return each.layout.within(of, at)

        args, kwargs = tree_map(tensor_of, self._given, is_leaf=_is_read)
        if self._state is None:
            made = self._func(*args, **kwargs)
        else:
            with fork_random_state(self._device):
                default_generator(self._device).set_state(self._state)
                made = self._func(*args, **kwargs)
        for result, value in zip(
            self._results, tree_leaves(made) if whole is None else [whole], strict=True
        ):
            filled = None if result is None else result()
            if filled is not None and filled.value is None:
                filled.value = value
        for each in self.inputs:
            uses[each] -= 1
            if uses[each] <= 0:
                each.free()


class Recipe:
    """A saved tensor: its place in some memory, and all memory that is read on the way to it."""

    def __init__(self, filled: Filled, layout: Layout, needed: Sequence[Filled]) -> None:
        self._filled = filled
        self._layout = layout
        self._needed = needed
        filled.saved += 1
        for each in needed:
            each.waiting += 1

    def read(self) -> Tensor:
        """Return the tensor; what no other saved tensor reads is freed."""
        uses = Counter(each for one in self._needed if one.kept is None for each in one.made_of())
        with torch.no_grad(), without_autocast():  # operators were seen below of both
            values = self._layout.within(self._filled.read(uses), self._filled.layout)
        self._filled.saved -= 1
        for each in self._needed:
            each.waiting -= 1
            each.free()
        return values


def _is_read(value: Any) -> bool:
    return isinstance(value, Read)


def _empty(layout: Layout, device: torch.device) -> Tensor:
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=device)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is one of no subclass, whose memory holds its values."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_conj() and not tensor.is_neg()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return a tensor with its dims by descending stride."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is one piece of memory, each value once."""
    if not is_plain(tensor) or not tensor.numel():
        return False
    return tensor.is_contiguous() or in_memory_order(tensor.detach()).is_contiguous()


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its memory, each value once."""
    return (
        is_dense(tensor)
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )
