"""Where a stock model asks for attention and for its mask, and how both are answered by someone else.

The host looks both up by the name that a config holds as its attention implementation. Names of ours stand for the
host's own, so that whatever is not answered here goes to the host's function, bit by bit.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    padding_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["and_masks"]

causal_mask_function: Any = masking_utils.causal_mask_function
"""Of a plain decoder; the host passes this very function."""

Attend = Callable[..., Any]
"""``(host's function, module, query, key, value, mask, **kwargs)`` -> what the host's function returns."""
MakeMask = Callable[..., Any]
"""``(host's function, whether queries that read nothing are to read all, **kwargs)`` -> a mask."""
_READS_ALL = ("eager",)
"""Implementations that hide a key by a large negative number: where a query's keys are all hidden, none is."""


def leave_out_padding(padding: Tensor) -> Callable[..., Tensor]:
    """Of ``[b, s]``, False where a token is padding: the mask function that hides those keys."""
    function: Callable[..., Tensor] = padding_mask_function(padding)
    return function


def keep_documents_apart(
    function: Callable[..., Tensor], position_ids: Tensor, documents: Tensor
) -> Callable[..., Tensor]:
    """What the host makes of a mask function for packed rows; both ``[b, s]``."""
    made: Callable[..., Tensor]
    # Newer versions count windows and chunks from where an example begins.
    compatible = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if compatible is not None:
        made = compatible(function, position_ids, documents)
    else:
        made = and_masks(function, masking_utils.packed_sequence_mask_function(documents))
    return made


def place_by_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A mask function for one place, of indices that broadcast against one another: ``[b, 1, 1, 1]`` and so on."""

    def spread(*indices: Tensor) -> Tensor:
        spread_over = function
        for dim in reversed(range(len(indices))):
            dims = tuple(0 if each == dim else None for each in range(len(indices)))
            spread_over = torch.vmap(spread_over, in_dims=dims)
        with TransformGetItemToIndex():
            found: Tensor = spread_over(*(index.flatten() for index in indices))
        return found

    return spread


def answer(prefix: str, host: str, attend: Attend, make_mask: MakeMask) -> str:
    """Register ``attend`` and ``make_mask`` in front of the implementation ``host``; returns the name of both."""
    name = f"{prefix}{host}"

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        return attend(_function_of(host, module), module, query, key, value, attention_mask, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return make_mask(ALL_MASK_ATTENTION_FUNCTIONS[host], host in _READS_ALL, *args, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def _function_of(host: str, module: nn.Module) -> Callable[..., Any]:
    """The host's attention; the eager one is in the file of the module's class, or of one that it derives from."""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    eager: Any = next((f for file in files if (f := getattr(file, "eager_attention_forward", None)) is not None), None)
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(host, eager)
    return found


def asks_for_attention(config: Any) -> bool:
    """Whether a config says by which implementation its modules attend."""
    return hasattr(config, "_attn_implementation")


def implementation_of(config: Any) -> str:
    """The name of a config's attention implementation."""
    return str(getattr(config, "_attn_implementation", None))


def set_implementation(config: Any, name: str) -> None:
    """Have the modules that share ``config`` ask for the implementation ``name``."""
    config._attn_implementation_internal = name


@contextmanager
def masks_made_here(kind: type) -> Iterator[None]:
    """Within: the host takes a mask of ``kind`` for one that is made already, where one function of a model hands it to
    another; and it looks for no packed examples in the positions it has.
    """
    examples, prepared = masking_utils.find_packed_sequence_indices, masking_utils._preprocess_mask_arguments

    def unless_made(config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(attention_mask, kind):
            return prepared(config, inputs_embeds, attention_mask, *args, **kwargs)
        of_four_dims = torch.empty(1, 1, 1, 1, device="meta")  # which the host takes for such a one
        leaves, _, *rest = prepared(config, inputs_embeds, of_four_dims, *args, **kwargs)
        return leaves, attention_mask, *rest

    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    masking_utils._preprocess_mask_arguments = unless_made
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = examples
        masking_utils._preprocess_mask_arguments = prepared
