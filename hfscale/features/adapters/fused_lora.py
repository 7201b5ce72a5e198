"""Compute LoRA on PEFT's own wrappers by one operator, which saves a projection's input once, without copies.

The wrapped projection is called unchanged, with everything that tensor parallelism, data parallelism and quantization
have installed in it. :func:`hfscale.distributed.ops.low_rank.add_low_rank` adds the adapter's product to its output.
Factors are read in the same way as in their own forward passes, so partial gradients are summed. A wrapper runs PEFT's
own code in every pass in which it computes anything else (dropout, DoRA, several adapters, merged adapters), or if its
inner modules have hooks.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..._compat.peft import (
    LORA_A,
    LORA_B,
    active_lora,
    adds_lora,
    is_wrapper,
    modules_in,
    wrapped_by_peft,
)
from ..._compat.torch import base_of, is_hooked, is_transformed
from ...distributed.ops.low_rank import Factors, LastCast, Term, add_low_rank, enter
from ...distributed.ops.overlap import as_rows, leaves_gradient, take_factors, with_notes_of
from ...models.module_kinds import PROJECTIONS
from ...parallel.tensor.partial_gradients import as_read
from ...plan.feature_plans import recomputed
from ...train.runtime import Part, Runtime
from ...train.runtime.parameter_names import module_at
from ...train.runtime.shards import LocalWeights

_NOTED = "_hfscale_noted_forward"
_MAKERS = ("bitsandbytes", "hfscale")
"""Packages whose projections return outputs and input gradients to which no other code holds a reference."""

_FRESH = frozenset({"MmBackward0", "AddmmBackward0", "AddBackward0", "UnsafeViewBackward0"})
"""Autograd nodes that do not save their result, so that the result may be overwritten."""

_last_cast = LastCast()


class FusedAdapters(Part):
    """Make LoRA wrappers compute by one operator; hooks and functions that other features have installed on wrappers
    and projections still run.
    """

    def is_needed(self, runtime: Runtime) -> bool:
        """Return whether fusing is on and the model has adapters: those of the plan, or, in a run of one process, those
        that PEFT's own functions have added.
        """
        # Selective activation checkpointing saves results of products, so these must not be written in place.
        asked = runtime.options.fused_adapters and not recomputed(runtime.plan).keep
        return asked and (runtime.adapters is not None or wrapped_by_peft(runtime.model))

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Replace the forward pass of all wrappers except the head's, which the loss calls chunk by chunk."""
        left_out = set(getattr(runtime.adapters, "apart", ()))
        head = runtime.plan.head
        if head is not None and runtime.is_local(head):
            left_out.add(module_at(runtime.model, head))
        for wrapper in runtime.model.modules():
            if wrapper in left_out or "forward" in vars(wrapper) or not is_wrapper(wrapper):
                continue
            if why_unfused(wrapper) is None:
                _note_forwards(wrapper)
                # no closure, so that a deep copy calls the copied wrapper
                wrapper.forward = MethodType(_forward, wrapper)


def why_unfused(wrapper: Any) -> str | None:
    """Return the reason why a wrapper runs PEFT's own code, as a text; ``None`` if it computes by one operator."""
    if not adds_lora(wrapper):
        return f"computed by {type(wrapper).__name__}"
    lora = active_lora(wrapper)
    return lora if isinstance(lora, str) else None


def _note_forwards(wrapper: Any) -> None:
    """Record which forward functions hfscale has set on the modules in a wrapper, so that later replacements are
    noticed.
    """
    factors = (*modules_in(wrapper, LORA_A), *modules_in(wrapper, LORA_B))
    for module in (wrapper.base_layer, *factors):
        setattr(module, _NOTED, vars(module).get("forward"))


def _is_as_noted(module: nn.Module) -> bool:
    """Return whether a module still has no hooks, its recorded forward function, and no adapter of another library."""
    held = vars(module)
    known = held.get(_NOTED, _NOTED) is held.get("forward")
    return known and not is_hooked(module)


def _forward(wrapper: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute a wrapper's output, by its class's own code or by one operator."""
    compiles = torch.compiler.is_compiling()
    plain = not args and not kwargs and (compiles or not is_transformed())
    factors = _factors(wrapper) if plain else None
    if factors is None:
        return type(wrapper).forward(wrapper, x, *args, **kwargs)
    # A compiler traces both code paths and fuses the sums itself.
    if compiles:
        y = wrapper.base_layer(x)
        # Use two dims: models may write into this output in place, which autograd forbids for a view that the operator
        # returned.
        rows = add_low_rank(y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), factors, None)
        return rows.view_as(y)
    return _added_to(wrapper.base_layer, x, factors)


def _added_to(base: Any, x: Tensor, factors: Factors) -> Tensor:
    """Return the output of the projection ``base`` for ``x``, plus the product of ``x`` and the adapter's factors."""
    trains = torch.is_grad_enabled() and x.requires_grad
    if not _is_plain(base):
        term = Term(in_place=False) if trains else None
        y = base(x if term is None else enter(x, term))
        fresh = base_of(y) is None and type(y.grad_fn).__name__ in _FRESH
        return add_low_rank(y if fresh else _copied(y), _last_cast.of(x), factors, term)
    # Use two dims, because the output of a product with a bias would otherwise be a view.
    rows = as_rows(x)
    term = Term() if trains and not leaves_gradient(x) else None
    y = base(rows if term is None else with_notes_of(x, enter(rows, term)))
    # If there is no ``term``, gradients of the adapter flow through the graph of ``x``.
    kept = x if trains and term is None else _last_cast.of(x)
    return add_low_rank(_writable(y), kept, factors, term).view(*x.shape[:-1], y.shape[-1])


def _is_plain(base: nn.Module) -> bool:
    """Return whether a projection's output and its gradient may be overwritten in place."""
    return type(base) in PROJECTIONS or type(base).__module__.partition(".")[0] in _MAKERS


def _writable(y: Tensor) -> Tensor:
    """Return a projection's output as a tensor that is not a view: its base if the base has the same shape, strides and
    graph, otherwise a copy.
    """
    whole = base_of(y)
    if whole is None:
        return y
    same = whole.shape == y.shape and whole.stride() == y.stride()
    # If a custom autograd function returned ``y``, only ``y`` has a graph, and its base has none.
    has_graph = whole.grad_fn is not None or not y.requires_grad
    return whole if same and has_graph else _copied(y)


def _copied(y: Tensor) -> Tensor:
    return y.clone(memory_format=torch.contiguous_format)


def _factors(wrapper: Any) -> Factors | None:
    """Return the LoRA factors with which a wrapper computes; ``None`` if the wrapper must run its own code."""
    lora = active_lora(wrapper)
    if isinstance(lora, str):
        return None
    first, second, scale = lora
    as_noted = _is_as_noted(wrapper.base_layer) and _is_as_noted(first) and _is_as_noted(second)
    if not as_noted:
        return None
    tokens = take_factors(first)
    if tokens is None:
        a = as_read(first, "weight")
        b = as_read(second, "weight")
    else:
        a, b = tokens.values
    if a is None or b is None or a.dtype != b.dtype:
        return None
    if isinstance(a, DTensor) or isinstance(b, DTensor):
        return None
    return Factors(a, b, as_read(second, "bias"), scale, tokens)
