"""Represent logits that are computed on demand, so that the loss can compute them chunk by chunk.

A stock training forward pass projects the hidden states onto the vocabulary, in some models scales or caps the logits,
and passes the logits to the loss. :class:`LazyLogits` replaces these logits: it has their shape and dtype but no
memory, and records the pointwise operations applied to it. The loss then projects, scales and caps one chunk of rows at
a time. Any other use (indexing, printing, an operation not known to be pointwise) computes the real logits with their
autograd graph. Because operations are recorded at run time, not listed per model family, model classes in remote code
work too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch import as_plain_tensors, tensor_without_memory, tree_map

Pointwise = Callable[[Tensor], Tensor]

# Pointwise operations, by the name of the out-of-place variant. Each output entry depends on one entry of the logits
# and on plain numbers only.
_POINTWISE = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "tanh",
    "to", "float", "double", "half", "bfloat16", "contiguous", "clone",
    "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__",
)  # fmt: skip
_ASKS = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "itemsize",
    "nbytes",
)
_QUESTIONS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "__len__",
)
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _pointwise() -> dict[Any, tuple[str, Callable[..., Any]]]:
    """Return, for each pointwise torch function that lazy logits can record, its name and its out-of-place form.

    In-place functions are keys too; the out-of-place form is called when the logits are computed.
    """
    operators: dict[Any, tuple[str, Callable[..., Any]]] = {}
    for name in _POINTWISE:
        for holder in (torch, Tensor):
            plain = getattr(holder, name, None)
            if plain is not None:
                operators[plain] = operators[getattr(holder, f"{name}_", plain)] = (name, plain)
    return operators


_REPLAYED = _pointwise()
_ANSWERED = {getattr(Tensor, name).__get__ for name in _ASKS} | {
    getattr(Tensor, name) for name in _QUESTIONS
}
_ANSWERED |= {torch.is_floating_point, torch.is_complex, torch.numel}


class LazyLogits(Tensor):
    """Represent logits ``[..., V/t]`` of ``hidden [..., h]`` that are not computed yet."""

    hidden: Tensor
    head: Pointwise  # maps ``[n, h]`` to ``[n, V/t]``
    # applies the recorded pointwise operations to the head's output, and can be sent to other ranks; ``None`` if no
    # operation was recorded
    finish: "_Step | None"
    reusable: bool  # whether the memory of the logits may be overwritten: the last operation does not save its result
    sample: Tensor  # logits of zero rows, from which the dtype after each operation is read
    graph: bool  # whether the real logits require a gradient
    value: Tensor | None  # the real logits, once they were computed

    @staticmethod
    def __new__(cls, hidden: Tensor, head: Pointwise, sample: Tensor, graph: bool) -> "LazyLogits":
        """Create the logits as a tensor without memory."""
        shape = (*hidden.shape[:-1], sample.shape[-1])
        made: LazyLogits = tensor_without_memory(cls, shape, sample.dtype, sample.device)
        made.hidden = hidden
        made.head = head
        made.sample = sample
        made.graph = graph
        made.finish = None
        made.reusable = True
        made.value = None
        return made

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of some rows of ``hidden``."""
        raw = self.head(hidden)
        return raw if self.finish is None else self.finish(raw)

    def split_rows(self, sizes: list[int]) -> "list[LazyLogits]":
        """Split lazy logits along the first dim into several lazy logits, with ``sizes`` rows."""
        parts = [
            LazyLogits(hidden, self.head, self.sample, self.graph)
            for hidden in self.hidden.split(sizes)
        ]
        for part in parts:
            part.finish = self.finish
            part.reusable = self.reusable
        return parts

    def materialize(self) -> Tensor:
        """Return the real logits, with their autograd graph; the first call computes them."""
        if self.value is None:
            with torch.set_grad_enabled(self.graph):
                self.value = self.logits(self.hidden)
        return self.value

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERED:
            return as_plain_tensors(func, *args, **kwargs)
        if func == _REQUIRES_GRAD:
            return args[0].graph
        lazy = _record(func, args, kwargs)
        if lazy is not None:
            return lazy
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached only if __torch_function__ is bypassed (by an autograd.Function); computing here would lose the graph.
        raise RuntimeError(
            f"{func} reads logits, which a training step with labels does not compute: call the model without labels, "
            "and compute the loss from its logits"
        )


def defer_logits(head: Pointwise, hidden: Tensor, trains: bool) -> LazyLogits:
    """Return ``head(hidden)`` as lazy logits; ``trains``: whether the rows or the head require a gradient."""
    graph = torch.is_grad_enabled() and trains
    # Run in the caller's grad mode, because autocast caches the cast weights with the graph of this first call.
    sample = head(hidden.reshape(-1, hidden.shape[-1])[:0]).detach()
    return LazyLogits(hidden, head, sample, graph)


def _real(value: Any) -> Any:
    return value.materialize() if isinstance(value, LazyLogits) else value


def _record(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> LazyLogits | None:
    """Return lazy logits that also record ``func``, or ``None`` if ``func`` is no known pointwise operation on lazy
    logits.

    Other operands must be plain numbers.
    """
    if func not in _REPLAYED or any(isinstance(value, Tensor) for value in kwargs.values()):
        return None
    positions = [index for index, value in enumerate(args) if not _plain(value)]
    if (
        len(positions) != 1
        or not isinstance(lazy := args[positions[0]], LazyLogits)
        or lazy.value is not None
    ):
        return None
    name, replayed = _REPLAYED[func]
    # Clone scalar tensors, which may change before the operation is replayed.
    kept = tuple(
        value.clone() if type(value) is Tensor else None if value is lazy else value
        for value in args
    )
    step = _Step(lazy.finish, replayed, positions[0], kept, kwargs)
    sample = step.alone(lazy.sample)
    # the operation changes nothing, like .to() with the dtype of the logits
    if sample is lazy.sample:
        return lazy
    if sample.shape != lazy.sample.shape or sample.device != lazy.sample.device:
        return None
    if replayed is func:
        lazy = LazyLogits(lazy.hidden, lazy.head, sample, lazy.graph)
    elif sample.dtype != lazy.dtype:  # an in-place operation keeps the dtype
        return None
    # tanh saves its result for its gradient, so that the result's memory must not be overwritten.
    lazy.sample = sample
    lazy.finish = step
    lazy.reusable = name != "tanh"
    return lazy


@dataclass(frozen=True)
class _Step:
    """Apply one recorded operation to real logits, after the operations that were recorded before it."""

    before: "_Step | None"  # the operation before this one
    function: Callable[..., Tensor]
    place: int  # position of the logits in ``args``
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, logits: Tensor) -> Tensor:
        return self.alone(logits if self.before is None else self.before(logits))

    def alone(self, logits: Tensor) -> Tensor:
        return self.function(
            *self.args[: self.place], logits, *self.args[self.place + 1 :], **self.kwargs
        )


def _plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.dim() == 0 and not value.requires_grad
    return isinstance(
        value, (Number, torch.dtype, torch.device, torch.memory_format, str, type(None))
    )
