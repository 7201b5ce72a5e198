"""Record how memory was filled, so that it can be recomputed: the operator, its inputs, and the tensors that are kept.

:class:`Filled` is memory with the values that one operator wrote (its *content*), :class:`Operator` is the recorded
call, and :class:`Recipe` stands for a saved tensor until the backward pass reads it.
"""

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
    """Describe where a tensor lies within its storage: size, stride, offset and dtype."""

    size: Any
    stride: Any
    offset: Any
    dtype: torch.dtype

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> "Layout":
        """Return the layout of ``tensor``."""
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def in_storage(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor of this layout in ``storage``, without a graph."""
        size, stride, offset, dtype = self
        return torch.empty(0, dtype=dtype, device=storage.device).set_(
            storage, offset, size, stride
        )

    def within(self, whole: Tensor, base: "Layout") -> Tensor:
        """Return the tensor of this layout in the memory of ``whole``, whose layout was ``base`` when this layout was
        recorded.
        """
        if self == base:
            return whole
        begin = whole.storage_offset() * base.dtype.itemsize
        begin += self.offset * self.dtype.itemsize - base.offset * base.dtype.itemsize
        return self._replace(offset=begin // self.dtype.itemsize).in_storage(
            whole.untyped_storage()
        )


class Filled:
    """Describe memory and its content, the values that one operator wrote: hold the operator, and the content if it is
    kept or recomputed.

    Attributes:
        operator: the call that can be repeated to recompute the content; ``None``: the content must be kept.
        given: whether the memory exists until the backward pass anyway (the layer's input, weights).
        kept: a function that returns the kept content; ``None``: the content is not kept.
        value: the content while the backward pass needs it; otherwise ``None``.
    """

    def __init__(
        self, tensor: Tensor, operator: "Operator | None" = None, given: bool = False
    ) -> None:
        storage = tensor.untyped_storage()
        self.layout = Layout.of_tensor(tensor)
        self.operator = operator
        self.given = given
        self.kept: Callable[[], Tensor] | None = None
        self.rewritten = False  # whether earlier values of the same memory were also kept
        # number of saved tensors that are views of this memory and have not been read
        self.saved = 0
        # bytes of the largest of this memory and all memory that is read to recompute it
        self.widest: int = max(storage.nbytes(), 0 if operator is None else operator.widest)
        self.waiting = 0  # number of saved tensors that may need this memory and have not been read
        self.value: Tensor | None = None
        self._size, self._storage = storage.nbytes(), StorageWeakRef(storage)
        self._overwritten = False

    def now(self) -> Tensor | None:
        """Return the memory as a new tensor object without a graph; ``None`` if the memory is freed or overwritten."""
        storage = None if self._overwritten else living_storage(self._storage)
        return None if storage is None else self.layout.in_storage(storage)

    def before_writing(self, keep: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        """Handle that an operator is about to overwrite this memory: if a saved tensor still needs the current values,
        store a copy of them with ``keep``.
        """
        now = self.now() if self.kept is not None else None
        self.kept = self.kept if now is None else keep(now.clone())
        self._overwritten = True
        self.given = False

    def made_of(self) -> "list[Filled]":
        """Return the memory that :attr:`operator` reads; empty without an operator."""
        return [] if self.operator is None else self.operator.inputs

    def own_cost(self) -> float:
        """Return the bytes needed to keep this memory's values; infinite if the memory is freed or overwritten."""
        return (
            self._size
            if not self._overwritten and living_storage(self._storage) is not None
            else inf
        )

    def is_small(self) -> bool:
        """Return whether keeping this memory takes far fewer bytes than recomputing it reads, like a norm's scales."""
        return self.own_cost() * _SMALL <= self.widest

    def cost(self, known: dict["Filled", float]) -> float:
        """Return how many additional bytes must be kept so that the backward pass can read this memory's values: the
        bytes of this memory, or of its operator's inputs, whichever are fewer. ``known`` caches results.
        """
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
        """Return the memory's values, recomputed if they are not kept. ``uses`` counts how often operators of this
        recomputation will still read each memory.
        """
        if self.value is None and self.kept is not None:
            self.value = self.kept()
            if self.value.stride() != self.layout.stride:  # views need the recorded strides
                self.value = _empty(self.layout, self.value.device).copy_(self.value)
        if self.value is None and self.operator is not None:
            self.operator.run(uses)
        assert self.value is not None
        return self.value

    def free(self) -> None:
        """Free ``value`` in two cases: no unread saved tensor may need this memory; or the value can be recomputed, and
        no unread saved tensor is a view of this memory. A value that was kept can be read only once, so only the first
        case frees it.
        """
        # With retain_graph, ``waiting`` may be negative: everything may be read again.
        if self.waiting <= 0 or (self.kept is None and self.saved <= 0):
            self.value = None


class Read(NamedTuple):
    """Stand for a tensor argument of a recorded operator: the memory that contains the tensor, and the tensor's size,
    stride, offset and dtype.
    """

    filled: Filled | None  # ``None``: the tensor into which the operator writes
    layout: Layout


class Operator:
    """Record one call of an operator, so that it can be repeated.

    Args:
        given: positional and keyword arguments, with a :class:`Read` in place of each tensor.
        draws: whether the operator draws random numbers; their generator's state is recorded.
        into: for operators in place: the memory that the operator updates, or the layout that it overwrites.
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
        # Length of the longest chain of operators that must be repeated to recompute this operator's results.
        self.steps: int = 1 + max((leaf.steps for leaf in repeated if leaf is not None), default=0)
        self._results: list[weakref.ref[Filled] | None] = []

    def fills(self, results: Sequence[Filled | None]) -> None:
        """Record the memory that the operator has filled, in the order of its results."""
        self._results = [None if result is None else weakref.ref(result) for result in results]

    def run(self, uses: Counter[Filled]) -> None:
        """Repeat the call, set ``value`` of the memory that the operator fills, and free inputs that no later operator
        reads.
        """
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
    """Stand for a saved tensor: its memory, its layout in the memory, and all memory that recomputation may read."""

    def __init__(self, filled: Filled, layout: Layout, needed: Sequence[Filled]) -> None:
        self._filled = filled
        self._layout = layout
        self._needed = needed
        filled.saved += 1
        for each in needed:
            each.waiting += 1

    def read(self) -> Tensor:
        """Return the tensor, and free memory that no other saved tensor needs."""
        uses = Counter(each for one in self._needed if one.kept is None for each in one.made_of())
        # operators were recorded below autograd and autocast
        with (
            torch.no_grad(),
            without_autocast(),
        ):
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
    """Return whether a tensor is a plain ``Tensor`` (no subclass) whose memory holds its values (no lazy conjugate or
    sign).
    """
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_conj() and not tensor.is_neg()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with its dims permuted to descending strides."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's entries fill one interval of memory, each entry once."""
    if not is_plain(tensor) or not tensor.numel():
        return False
    return tensor.is_contiguous() or in_memory_order(tensor.detach()).is_contiguous()


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor's entries fill its whole storage, each entry once."""
    return (
        is_dense(tensor)
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )
