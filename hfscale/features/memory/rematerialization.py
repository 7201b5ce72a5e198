"""Keep of a layer only what its products and attention read, and compute the rest of it again in the backward pass.

::

    forward     x --norm--> n --product--> gate --silu--> s --+
                            +----product--> up ---------------x--> h --product--> y
    kept        x                          gate, up
    backward    h = silu(gate) * up, for the gradient of the last weight; then s; then n from x

Saved-tensor hooks decide about each tensor that autograd saves, by the operators that a dispatch mode has seen. Memory
that an elementwise operator, a norm, softmax, a copy or dropout has filled has a recipe: that operator and its inputs.
What anything else has filled (products, attention, exchanges between ranks) has to be kept. Of the ways to have a saved
tensor again the one that keeps fewest bytes is taken: its own, or what is missing of its inputs (as a cut of the graph,
Chen et al. 2016; torch.compile's partitioner does the same inside of compiled code). A norm's scales, a number a row,
are kept all the same.

Nothing else runs twice: no product, no exchange, no hook, none of the model's Python. What is kept goes through the
saved-tensor hooks around the layer, if any, so it can be offloaded, compressed or counted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.torch import (
    TorchDispatchMode,
    operator_name,
    saved_tensor_hooks,
    storage_key,
    tree_leaves,
    tree_map,
    written_by,
)
from ..._compat.transformers.hidden_states import hidden_states_of
from .recipes import Filled, Layout, Operator, Read, Recipe, is_dense, is_plain, is_whole

_REPEATED = frozenset(
    {
        "_to_copy",
        "_softmax",
        "_log_softmax",
        "native_layer_norm",
        "_fused_rms_norm",
        "native_dropout",
        "glu",
        "mean",
        "sum",
        "amax",
        "amin",
        "var",
        "var_mean",
        "linalg_vector_norm",
        "cat",
        "stack",
        "index",
        "gather",
        "index_select",
        "repeat",
        "roll",
        "flip",
        "constant_pad_nd",
        "tril",
        "triu",
        "bernoulli",
    }
)
"""Operators that run again besides those that torch calls pointwise; all return the same bits every time."""
_FILLING = frozenset({"bernoulli_", "uniform_", "normal_", "exponential_"})
"""Operators in place that overwrite all of a tensor, whatever it held."""
_MOST_STEPS = 40  # of a recipe; loops over tokens would else be one


class Rematerialization(TorchDispatchMode):
    """See the operators of one forward pass through a layer, and pack and unpack the tensors that it saves."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        # Now.
        self._known = {
            storage_key(each): Filled(each, given=True) for each in given if is_dense(each)
        }
        self._constants: dict[
            int, dict[Layout, Filled]
        ] = {}  # storage -> its parts that operators have read
        self._held: list[
            Tensor | None
        ] = []  # what products returned, until the layer is done: it may have to be kept
        outer = saved_tensor_hooks()
        self._is_hooked = outer is not None
        self._outer_pack: Callable[[Tensor], Any] = torch.detach if outer is None else outer[0]
        self._outer_unpack: Callable[[Any], Tensor] = _same if outer is None else outer[1]
        self._paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore operators inside of compiled code, which has a partitioner of its own."""
        return True

    def over(self) -> None:
        """End the forward pass: drop what only recording needs."""
        self._known = {}
        self._constants = {}
        self._held = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
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
                each.before_writing(self._keep)
        out = func(*args, **kwargs)
        if follows:
            self._note(operator, out, tensors, list(zip(written, before, strict=True)))
        return out

    def _note(
        self,
        operator: Operator | None,
        out: Any,
        tensors: list[Tensor],
        written: list[tuple[Tensor, Filled | None]],
    ) -> None:
        """Record what an operator that reads activations has filled."""
        results = list[Filled | None]()
        for tensor, filled in written:
            whole = (
                tensor if filled is None else filled.layout.within(tensor, Layout.of_tensor(tensor))
            )
            results.append(self._fill(whole, operator))
        if not written:
            read = {storage_key(tensor) for tensor in tensors if is_plain(tensor)}
            for leaf in tree_leaves(out):
                new = isinstance(leaf, Tensor) and is_plain(leaf) and storage_key(leaf) not in read
                results.append(self._fill(leaf, operator) if new else None)
        if operator is not None:
            operator.fills(results)

    def _find(self, tensor: Tensor) -> Filled | None:
        return self._known.get(storage_key(tensor)) if is_plain(tensor) else None

    def _operator(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        written: list[Tensor],
    ) -> Operator | None:
        """Return an operator as it is to be called again; ``None`` for one whose results must be kept."""
        # compiled code has none
        name = operator_name(func)
        tags = getattr(func, "tags", ())
        fills = name in _FILLING and len(tensors) == 1 and is_whole(tensors[0])
        repeated = (torch.Tag.pointwise in tags or name in _REPEATED) and any(
            map(self._find, tensors)
        )
        into = (
            Layout.of_tensor(tensors[0]) if fills else self._find(written[0]) if written else None
        )
        # What was there before.
        lost = bool(written) and (into is None or getattr(into, "operator", into) is None)
        if lost or not (fills or repeated):
            return None
        # Without gradients it is in a function with a backward pass of its own, whose kernels may write unseen.
        if (
            not torch.is_grad_enabled()
            or not all(map(is_plain, tensors))
            or kwargs.get("generator") is not None
        ):
            return None
        draws = torch.Tag.nondeterministic_seeded in tags
        given = tree_map(partial(self._read, written), (args, kwargs))
        operator = Operator(func, given, tensors[0].device, draws, into)
        return operator if operator.steps <= _MOST_STEPS else None

    def _read(self, written: list[Tensor], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return Read(
            None if any(leaf is tensor for tensor in written) else self._source(leaf),
            Layout.of_tensor(leaf),
        )

    def _source(self, tensor: Tensor) -> Filled:
        """Return the memory that a tensor reads; weights, tables and masks are there in any case."""
        filled = self._find(tensor)
        if filled is None:
            parts = self._constants.setdefault(storage_key(tensor), {})
            layout = Layout.of_tensor(tensor)
            filled = parts.setdefault(layout, Filled(tensor, given=True))
            filled.kept = filled.kept or partial(_same, tensor.detach())
        return filled

    def _fill(self, tensor: Tensor, operator: Operator | None) -> Filled | None:
        """Record that an operator that reads activations has filled a tensor."""
        before = self._known.pop(storage_key(tensor), None)
        if not is_whole(tensor):
            return None
        filled = self._known[storage_key(tensor)] = Filled(tensor, operator)
        filled.rewritten = before is not None and (before.rewritten or before.kept is not None)
        # Of no tile in the layer.
        own = torch.is_grad_enabled() and saved_tensor_hooks() == (
            self.pack,
            self.unpack,
        )
        self._held += [filled.now()] if operator is None and own else []
        return filled

    def _keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        return partial(self._outer_unpack, self._outer_pack(tensor))

    def pack(self, tensor: Tensor) -> Any:
        """Keep a saved tensor, or what it can be computed from; autograd calls it for every tensor that is saved."""
        filled = self._find(tensor)
        self._paused = True
        try:
            if filled is None:
                return self._outer_pack(tensor)
            needed = dict[Filled, None]()
            with torch.no_grad():
                self._secure(filled, needed, {})
            return Recipe(filled, Layout.of_tensor(tensor), list(needed))
        finally:
            self._paused = False

    def _secure(
        self, filled: Filled, needed: dict[Filled, None], costs: dict[Filled, float]
    ) -> None:
        """Keep what is missing to have ``filled`` again, and add all that is read on the way to ``needed``."""
        if filled in needed:
            return
        needed[filled] = None
        inputs = filled.made_of()
        own = 0.0 if filled.given or filled.operator is None else filled.own_cost()
        fewest = own <= sum(tensor.cost(costs) for tensor in inputs)
        if filled.kept is None and (fewest or filled.is_small()):
            now = filled.now()
            assert now is not None, "memory that must be kept is gone"
            # Hooks around tell contents of one place in memory apart by its version, which a new alias does not have.
            filled.kept = self._keep(now.clone() if filled.rewritten and self._is_hooked else now)
        for tensor in inputs if filled.kept is None else ():
            self._secure(tensor, needed, costs)

    def unpack(self, saved: Any) -> Tensor:
        """Return a saved tensor to the backward pass."""
        return saved.read() if isinstance(saved, Recipe) else self._outer_unpack(saved)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def rematerialize(layer: nn.Module) -> None:
    """Compute again in the backward pass of ``layer`` all but products, attention and exchanges between ranks."""
    forward = layer.forward

    def forward_rematerialized(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        stream = hidden_states_of(args, kwargs)
        tensors = tree_leaves((args, kwargs))
        given = [
            tensor
            for tensor in tensors
            if isinstance(tensor, Tensor) and (tensor is stream or tensor.requires_grad)
        ]
        current = Rematerialization(given)
        with torch.autograd.graph.saved_tensors_hooks(current.pack, current.unpack), current:
            output = forward(*args, **kwargs)
        current.over()
        return output

    forward_rematerialized.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects its signature
    layer.forward = forward_rematerialized  # type: ignore[method-assign]
