"""Save only the inputs of a layer's matrix products and attention, and recompute elementwise operators in backward.

::

    forward     x --norm--> n --product--> gate --silu--> s --+
                            +----product--> up ---------------x--> h --product--> y
    kept        x                          gate, up
    backward    h = silu(gate) * up, for the gradient of the last weight; then s; then n from x

A dispatch mode records the operators of the forward pass. Memory that is filled by an elementwise operator, a norm,
softmax, a copy or dropout can be recomputed from the operator and its inputs. Memory that is filled by any other
operator (matrix products, attention, communication) must be kept. For each tensor that autograd saves, a saved-tensor
hook keeps either the tensor or the inputs from which it is recomputed, whichever takes fewer additional bytes
(a cut of the graph, Chen et al. 2016; torch.compile's partitioner does the same inside compiled code). A norm's scales,
one number per row, are always kept.

No matrix product, communication, hook or Python code of the model runs twice. Kept tensors pass through the
saved-tensor hooks around the layer, if any, so they can be offloaded, compressed or counted.
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
"""Operators that are recomputed, in addition to those that torch tags as pointwise; all are deterministic bit for
bit.
"""
_FILLING = frozenset({"bernoulli_", "uniform_", "normal_", "exponential_"})
"""Operators in place that overwrite a whole tensor without reading it."""
_MOST_STEPS = 40  # longest chain of recomputed operators; a loop over tokens would otherwise be one long chain


class Rematerialization(TorchDispatchMode):
    """Record the operators of one forward pass through a layer, and pack and unpack the tensors that autograd saves.
    ``given`` are the layer's inputs, which are kept anyway.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        # Storage -> the record of the values that it holds now.
        self._known = {
            storage_key(each): Filled(each, given=True) for each in given if is_dense(each)
        }
        # Storage of weights, tables and masks -> the views that operators have read.
        self._constants: dict[int, dict[Layout, Filled]] = {}
        # Results of matrix products. They stay alive until the layer's forward ends, since they may have to be kept.
        self._held: list[Tensor | None] = []
        outer = saved_tensor_hooks()
        self._is_hooked = outer is not None
        self._outer_pack: Callable[[Tensor], Any] = torch.detach if outer is None else outer[0]
        self._outer_unpack: Callable[[Any], Tensor] = _same if outer is None else outer[1]
        self._paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: operators inside compiled code are not recorded, since torch.compile has its own partitioner."""
        return True

    def over(self) -> None:
        """End the forward pass: free the data that only recording needs."""
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
        """Record the memory that a call has filled. ``operator`` is ``None`` if its results must be kept. ``written``
        are the tensors that the call wrote in place, each with the record of its earlier values.
        """
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
        """Return a record with which the call can be repeated; ``None`` if the call's results must be kept."""
        # Compiled code has no operator name.
        name = operator_name(func)
        tags = getattr(func, "tags", ())
        fills = name in _FILLING and len(tensors) == 1 and is_whole(tensors[0])
        repeated = (torch.Tag.pointwise in tags or name in _REPEATED) and any(
            map(self._find, tensors)
        )
        into = (
            Layout.of_tensor(tensors[0]) if fills else self._find(written[0]) if written else None
        )
        # Whether the values that the call updates in place cannot be recomputed.
        lost = bool(written) and (into is None or getattr(into, "operator", into) is None)
        if lost or not (fills or repeated):
            return None
        # Gradients are off inside autograd functions, whose kernels may write memory without the dispatch mode.
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
        """Return the memory of a tensor. Tensors that no recorded call has filled (weights, tables, masks) count
        as kept.
        """
        filled = self._find(tensor)
        if filled is None:
            parts = self._constants.setdefault(storage_key(tensor), {})
            layout = Layout.of_tensor(tensor)
            filled = parts.setdefault(layout, Filled(tensor, given=True))
            filled.kept = filled.kept or partial(_same, tensor.detach())
        return filled

    def _fill(self, tensor: Tensor, operator: Operator | None) -> Filled | None:
        """Record that a call has filled ``tensor``; ``operator=None``: the content must be kept."""
        before = self._known.pop(storage_key(tensor), None)
        if not is_whole(tensor):
            return None
        filled = self._known[storage_key(tensor)] = Filled(tensor, operator)
        filled.rewritten = before is not None and (before.rewritten or before.kept is not None)
        # Whether the call is directly in this layer, and not inside another module's saved-tensor hooks.
        own = torch.is_grad_enabled() and saved_tensor_hooks() == (
            self.pack,
            self.unpack,
        )
        self._held += [filled.now()] if operator is None and own else []
        return filled

    def _keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        return partial(self._outer_unpack, self._outer_pack(tensor))

    def pack(self, tensor: Tensor) -> Any:
        """Keep a saved tensor, or the tensors from which it can be recomputed. Autograd calls this for every tensor
        that is saved.
        """
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
        """Keep ``filled``, or the inputs from which it is recomputed, whichever takes fewer additional bytes. Add all
        memory that recomputation reads to ``needed``.
        """
        if filled in needed:
            return
        needed[filled] = None
        inputs = filled.made_of()
        own = 0.0 if filled.given or filled.operator is None else filled.own_cost()
        fewest = own <= sum(tensor.cost(costs) for tensor in inputs)
        if filled.kept is None and (fewest or filled.is_small()):
            now = filled.now()
            assert now is not None, "memory that must be kept is gone"
            # Outer hooks recognize that memory was overwritten by the tensor's version, which a new alias does not
            # carry over.
            filled.kept = self._keep(now.clone() if filled.rewritten and self._is_hooked else now)
        for tensor in inputs if filled.kept is None else ():
            self._secure(tensor, needed, costs)

    def unpack(self, saved: Any) -> Tensor:
        """Return a saved tensor to the backward pass."""
        return saved.read() if isinstance(saved, Recipe) else self._outer_unpack(saved)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def rematerialize(layer: nn.Module) -> None:
    """Make ``layer`` recompute its activations in the backward pass, except results of matrix products, attention and
    communication.
    """
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
