"""Keep of a layer only what its products and attention read, and compute the rest of it again in the backward pass.

::

    forward     x --norm--> n --product--> gate --silu--> s --+
                            +----product--> up ---------------x--> h --product--> y
    kept        x                          gate, up
    backward    h = silu(gate) * up, for the gradient of the last weight; then s; then n from x

Saved-tensor hooks decide about each tensor that autograd saves, by the operators that a dispatch mode has seen. Memory
that an elementwise operator, a norm, a softmax, a copy or dropout has filled is written down as that operator and its
inputs; what anything else has filled (products, attention, exchanges between ranks) has to be kept. Of the ways to have
a saved tensor again the one that keeps fewest bytes is taken: its own, or what is missing of its inputs (as a cut of
the graph, Chen et al. 2016; torch.compile's partitioner does the same inside of compiled code).

Nothing else runs twice: no product, no exchange, no hook, none of the model's Python. What is kept goes through the
saved-tensor hooks around the layer, if any, so it can be offloaded, compressed or counted.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..._compat.torch import (
    TorchDispatchMode,
    living_storage,
    saved_tensor_hooks,
    storage_key,
    tree_leaves,
    tree_map,
    without_autocast,
    written_by,
)
from ..._compat.torch_device import fork_random_state
from ..._compat.transformers.hidden_states import hidden_states_of
from ...parallel.tensor.random import default_generator

_REPEATED = frozenset(
    {
        *("_to_copy", "_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm", "native_dropout", "glu"),
        *("mean", "sum", "amax", "amin", "var", "var_mean", "linalg_vector_norm", "cat", "stack", "index", "gather"),
        *("index_select", "repeat", "roll", "flip", "constant_pad_nd", "tril", "triu", "bernoulli"),
    }
)
"""Operators that run again besides those that torch calls pointwise; all return the same bits every time."""
_FILLING = frozenset({"bernoulli_", "uniform_", "normal_", "exponential_"})
"""Operators in place that overwrite all of a tensor, whatever it held."""
_MOST_STEPS = 40  # from a tensor back to what is kept; loops over tokens would else be written down as one chain


class _Layout(NamedTuple):
    """The place of a tensor within its memory."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        return cls(tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def within(self, whole: Tensor, base: "_Layout") -> Tensor:
        """Return the tensor at this place in the memory of ``whole``, which has been at ``base``."""
        if self == base:
            return whole
        begin = whole.storage_offset() * base.dtype.itemsize
        begin += self.offset * self.dtype.itemsize - base.offset * base.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=whole.device)
        return empty.set_(whole.untyped_storage(), begin // self.dtype.itemsize, self.size, self.stride)  # type: ignore[call-overload,no-any-return]


class _Filled:
    """Memory as one operator has filled it: how to fill it again, what is kept of it, and its value meanwhile."""

    def __init__(self, tensor: Tensor, operator: "_Operator | None" = None, given: bool = False) -> None:
        storage = tensor.untyped_storage()
        self.layout, self.size, self.given = _Layout.of(tensor), storage.nbytes(), given
        self.operator = operator
        self.kept: Callable[[], Tensor] | None = None
        self.readers = 0  # saved tensors that need its value and have not been read
        self.value: Tensor | None = None
        self._storage: StorageWeakRef | None = StorageWeakRef(storage)

    def now(self) -> Tensor | None:
        """Return the memory as a tensor of its own, without a graph; ``None`` if it is gone or overwritten."""
        storage = None if self._storage is None else living_storage(self._storage)
        if storage is None:
            return None
        size, stride, offset, dtype = self.layout
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage, offset, size, stride)  # type: ignore[call-overload,no-any-return]

    def overwritten(self) -> None:
        """Record that the memory has got another content."""
        self._storage, self.given = None, False

    def own_cost(self) -> float:
        """Return the bytes that keeping it takes."""
        return self.size if self._storage is not None and living_storage(self._storage) is not None else inf

    def cost(self, known: dict["_Filled", float]) -> float:
        """Return the fewest bytes that must be kept besides those that are, to have it again."""
        if self.kept is not None or self.given:
            return 0.0
        if self not in known:
            known[self] = self.own_cost()
            if self.operator is not None:
                known[self] = min(known[self], sum(each.cost(known) for each in self.operator.inputs))
        return known[self]

    @property
    def steps(self) -> int:
        """The operators between this and what is kept."""
        return 0 if self.kept is not None or self.operator is None else self.operator.steps

    def read(self) -> Tensor:
        """Return its value; compute it if need be."""
        if self.value is None:
            if self.kept is not None:
                value = self.kept()
                if value.stride() != self.layout.stride:  # views count on it
                    value = torch.empty_strided(*self.layout[:2], dtype=value.dtype, device=value.device).copy_(value)
                self.value = value
            else:
                assert self.operator is not None
                self.operator.run()
        assert self.value is not None
        return self.value


class _Read(NamedTuple):
    """An argument of an operator: a tensor at a place of some memory."""

    filled: _Filled | None  # ``None``: the tensor that the operator writes into
    layout: _Layout


class _Operator:
    """An operator as it was called.

    Args:
        given: positional and keyword arguments, with :class:`_Read` in place of tensors.
        state: the random generator's, if it draws numbers.
        into: for one in place, what it writes into before it does, or the place of memory that it overwrites.
    """

    def __init__(self, func: Any, given: Any, state: Tensor | None, into: _Filled | _Layout | None) -> None:
        self._func, self._given, self._state, self._into = func, given, state, into
        self.inputs = [each.filled for each in tree_leaves(given, is_leaf=_is_read) if _is_read(each) and each.filled]
        self.inputs += [into] if isinstance(into, _Filled) else []
        self.steps = 1 + max((each.steps for each in self.inputs), default=0)
        self.device = torch.device("cpu")
        self._results: list[weakref.ref[_Filled] | None] = []

    def fills(self, results: Sequence[_Filled | None]) -> None:
        """Record what it has filled, in the order of its results."""
        self._results = [None if each is None else weakref.ref(each) for each in results]

    def run(self) -> None:
        """Call it again, and set the value of all that it fills and somebody waits for."""
        whole, base = None, None
        if isinstance(self._into, _Filled):
            whole, base = self._into.read().clone(), self._into.layout
        elif self._into is not None:
            base = self._into
            whole = torch.empty_strided(*base[:2], dtype=base.dtype, device=self.device)

        def tensor_of(each: Any) -> Any:
            if not _is_read(each):
                return each
            if each.filled is not None:
                return each.layout.within(each.filled.read(), each.filled.layout)
            return each.layout.within(whole, base)

        args, kwargs = tree_map(tensor_of, self._given, is_leaf=_is_read)
        if self._state is None:
            made = self._func(*args, **kwargs)
        else:
            with fork_random_state(self.device):
                default_generator(self.device).set_state(self._state)
                made = self._func(*args, **kwargs)
        for result, value in zip(self._results, tree_leaves(made) if whole is None else [whole], strict=True):
            waiting = None if result is None else result()
            if waiting is not None and waiting.value is None:
                waiting.value = value


def _is_read(value: Any) -> bool:
    return isinstance(value, _Read)


class _Saved:
    """A tensor that autograd has saved: ``kept`` as it is, or at a place of memory that ``needed`` leads to."""

    def __init__(self, place: _Read, needed: Sequence[_Filled]) -> None:
        self._place, self._needed = place, needed
        for each in self._readers():
            each.readers += 1

    def _readers(self) -> list[_Filled]:
        """Return what stays as long as a saved tensor that needs it is not read: itself, and what is kept of it."""
        return [each for each in self._needed if each is self._place.filled or each.kept is not None]

    def read(self) -> Tensor:
        """Return the tensor; what no other saved tensor needs is freed."""
        filled, layout = self._place
        assert filled is not None
        with torch.no_grad(), without_autocast():  # operators were seen below of both
            found = layout.within(filled.read(), filled.layout)
        for each in self._readers():
            each.readers -= 1
        for each in self._needed:
            if each.readers <= 0:  # with retain_graph everything may be read again
                each.value = None
        return found


class Rematerialization(TorchDispatchMode):
    """See the operators of one forward pass through a layer, and pack and unpack the tensors that it saves."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._known: dict[int, _Filled] = {}  # storage -> what is in it now
        self._held: list[Tensor] = []  # what products returned, until the layer is done: it may be what has to be kept
        self._outer_pack, self._outer_unpack = saved_tensor_hooks() or (torch.detach, lambda kept: kept)
        self._paused = False
        self._constants: dict[int, dict[_Layout, _Filled]] = {}  # storage -> its parts that operators have read
        self._known |= {storage_key(tensor): _Filled(tensor, given=True) for tensor in given if _is_dense(tensor)}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore operators inside of compiled code, which has a partitioner of its own."""
        return True

    def over(self) -> None:
        """End the forward pass: drop what only recording needs."""
        self._known, self._constants, self._held = {}, {}, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = written_by(func, args, kwargs)
        operator = self._operator(func, args, kwargs, tensors, written)
        follows = operator is not None or any(self._find(tensor) is not None for tensor in tensors)
        before = [self._find(tensor) for tensor in written]
        for tensor, filled in zip(written, before, strict=True):
            constants = self._constants.pop(storage_key(tensor), {}).values()
            for each in (*constants, *([filled] if filled is not None else [])):
                self._keep_before_writing(each)
        out = func(*args, **kwargs)
        if follows:
            self._note(operator, out, tensors, list(zip(written, before, strict=True)))
        return out

    def _find(self, tensor: Tensor) -> _Filled | None:
        return self._known.get(storage_key(tensor)) if type(tensor) in (Tensor, nn.Parameter) else None

    def _operator(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], written: list[Tensor]) -> Any:
        """Return an operator as it is to be called again; ``None`` for one whose results must be kept."""
        name, tags = getattr(func, "_opname", ""), getattr(func, "tags", ())
        fills = name in _FILLING and len(written) == 1 and len(tensors) == 1 and _is_whole(written[0])
        repeated = torch.Tag.pointwise in tags or name in _REPEATED
        plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        if not ((fills or repeated) and torch.is_grad_enabled() and plain and kwargs.get("generator") is None):
            return (
                None  # without gradients: inside of a function with a backward pass of its own, whose kernels may write
            )
        into: _Filled | _Layout | None = _Layout.of(written[0]) if fills else None
        if not fills:
            if not any(self._find(tensor) is not None for tensor in tensors):
                return None
            if written:
                into = self._find(written[0])
                if len(written) > 1 or into is None or into.operator is None:
                    return None

        def read(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return _Read(None if any(leaf is each for each in written) else self._constant(leaf), _Layout.of(leaf))

        device, state = tensors[0].device, None
        if torch.Tag.nondeterministic_seeded in tags and device.type != "meta":
            state = default_generator(device).get_state()
        found = _Operator(func, tree_map(read, (args, kwargs)), state, into)
        found.device = device
        return found if found.steps <= _MOST_STEPS else None

    def _constant(self, tensor: Tensor) -> _Filled:
        """Return the memory that a tensor reads; weights, tables and masks are there in any case."""
        found = self._find(tensor)
        if found is not None:
            return found
        parts, layout = self._constants.setdefault(storage_key(tensor), {}), _Layout.of(tensor)
        if layout not in parts:
            parts[layout] = _Filled(tensor, given=True)
            parts[layout].kept = partial(_same, tensor.detach())
        return parts[layout]

    def _keep_before_writing(self, filled: _Filled) -> None:
        """Keep a copy of memory that is about to be written into, if anything counts on its content."""
        if filled.kept is not None:
            now = filled.now()
            if now is not None:
                filled.kept = partial(self._outer_unpack, self._outer_pack(now.clone()))
        filled.overwritten()

    def _note(
        self,
        operator: _Operator | None,
        out: Any,
        tensors: Sequence[Tensor],
        written: Sequence[tuple[Tensor, _Filled | None]],
    ) -> None:
        """Record what an operator that reads activations has filled."""
        results = list[_Filled | None]()
        for tensor, before in written:
            whole = tensor
            if before is not None:
                with torch.no_grad():
                    whole = before.layout.within(tensor, _Layout.of(tensor))
            results.append(self._filled(whole, operator))
        if not written:
            read = {storage_key(tensor) for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)}
            for leaf in tree_leaves(out):
                new = type(leaf) is Tensor and storage_key(leaf) not in read
                results.append(self._filled(leaf, operator) if new else None)
        if operator is not None:
            operator.fills(results)

    def _filled(self, tensor: Tensor, operator: _Operator | None) -> _Filled | None:
        if not _is_whole(tensor):
            self._known.pop(storage_key(tensor), None)
            return None
        found = self._known[storage_key(tensor)] = _Filled(tensor, operator)
        now = found.now() if operator is None and torch.is_grad_enabled() else None
        self._held += [] if now is None else [now]
        return found

    def pack(self, tensor: Tensor) -> Any:
        """Keep a saved tensor, or what it can be computed from; autograd calls it for every tensor that is saved."""
        filled, self._paused = self._find(tensor), True
        try:
            if filled is None or tensor.is_conj() or tensor.is_neg():
                return self._outer_pack(tensor)
            needed = dict[_Filled, None]()
            with torch.no_grad():
                self._secure(filled, needed, {})
            return _Saved(_Read(filled, _Layout.of(tensor)), list(needed))
        finally:
            self._paused = False

    def _secure(self, filled: _Filled, needed: dict[_Filled, None], costs: dict[_Filled, float]) -> None:
        """Keep what is missing to have ``filled`` again, and add all that is read on the way to ``needed``."""
        if filled in needed:
            return
        needed[filled] = None
        if filled.kept is not None:
            return
        inputs = () if filled.operator is None else filled.operator.inputs
        if filled.given or filled.operator is None or filled.own_cost() <= sum(each.cost(costs) for each in inputs):
            now = filled.now()
            assert now is not None, "memory that must be kept is gone"
            filled.kept = partial(self._outer_unpack, self._outer_pack(now))
        for each in inputs if filled.kept is None else ():
            self._secure(each, needed, costs)

    def unpack(self, saved: Any) -> Tensor:
        """Return a saved tensor to the backward pass."""
        found: Tensor = saved.read() if isinstance(saved, _Saved) else self._outer_unpack(saved)
        return found


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is one piece of memory, each value once."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return False
    stride = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: stride[dim], reverse=True)
    return tensor.is_contiguous() or tensor.detach().permute(order).is_contiguous()


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its memory, each value once."""
    return _is_dense(tensor) and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def rematerialize(layer: nn.Module) -> None:
    """Compute again in the backward pass of ``layer`` all but products, attention and exchanges between ranks."""
    forward = layer.forward

    def forward_rematerialized(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        stream = hidden_states_of(args, kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        current = Rematerialization([each for each in tensors if each is stream or each.requires_grad])
        with torch.autograd.graph.saved_tensors_hooks(current.pack, current.unpack), current:
            output = forward(*args, **kwargs)
        current.over()
        return output

    forward_rematerialized.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects its signature
    layer.forward = forward_rematerialized  # type: ignore[method-assign]
