"""Replace attention functions and masks of stock models.

Transformers looks both up by the name of the attention implementation in a config. Registered names of our own wrap its
implementations, so that every case not handled here goes to its function, bit for bit.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks
from transformers.masking_utils import padding_mask_function as leave_out_padding
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..replaced import attribute_replaced

__all__ = ["and_masks", "leave_out_padding"]

causal_mask_function: Any = masking_utils.causal_mask_function
"""The mask function of a plain decoder; transformers passes this very function."""

Attend = Callable[..., Any]
"""``(stock function, module, query, key, value, mask, **kwargs)`` -> the stock function's result."""
MakeMask = Callable[..., Any]
"""``(stock function, whether a query with all keys hidden reads all of them, **kwargs)`` -> a mask."""
_READS_ALL = ("eager",)
"""Implementations that hide a key by a large negative number: if all keys of a query are hidden, none is."""


def keep_documents_apart(
    function: Callable[..., Tensor], position_ids: Tensor, documents: Tensor
) -> Callable[..., Tensor]:
    """Return the mask function for packed rows from ``function``; positions and documents are ``[b, s]``."""
    # Newer versions count windows and chunks from where an example begins.
    compatible: Any = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if compatible is None:
        return and_masks(function, masking_utils.packed_sequence_mask_function(documents))
    return compatible(function, position_ids, documents)  # type: ignore[no-any-return]


def place_by_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Vectorize a mask function of one position over indices that broadcast, ``[b, 1, 1, 1]`` and so on."""

    def spread(*indices: Tensor) -> Tensor:
        spread_over = function
        for dim in reversed(range(len(indices))):
            dims = tuple(0 if each == dim else None for each in range(len(indices)))
            spread_over = torch.vmap(spread_over, in_dims=dims)
        with TransformGetItemToIndex():
            found: Tensor = spread_over(*(index.flatten() for index in indices))
        return found

    return spread


def _stock_mask(host: Callable[..., Any], fills: bool, *args: Any, **kwargs: Any) -> Any:
    return host(*args, **kwargs)


def answer(prefix: str, host: str, attend: Attend, make_mask: MakeMask = _stock_mask) -> str:
    """Register ``attend`` and ``make_mask`` in front of the implementation ``host``; return the name of both."""
    name = f"{prefix}{host}"

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        return attend(_function_of(host, module), module, query, key, value, attention_mask, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return make_mask(ALL_MASK_ATTENTION_FUNCTIONS[host], host in _READS_ALL, *args, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def _function_of(host: str, module: nn.Module) -> Callable[..., Any]:
    """Return the stock attention function; the eager one is in the file of the module's class, or of a base class."""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    eager: Any = next((f for file in files if (f := getattr(file, "eager_attention_forward", None)) is not None), None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(host, eager)


def asks_for_attention(config: Any) -> bool:
    """Return whether a config names an attention implementation."""
    return hasattr(config, "_attn_implementation")


def implementation_of(config: Any) -> str:
    """Return the name of a config's attention implementation."""
    return str(getattr(config, "_attn_implementation", None))


def set_implementation(config: Any, name: str) -> None:
    """Set the attention implementation of the modules that share ``config``."""
    config._attn_implementation_internal = name


@contextmanager
def masks_made_here(kind: type) -> Iterator[None]:
    """Let transformers accept masks of type ``kind`` as ready-made inside the ``with`` block; it then also looks for no
    packed examples in the positions.
    """
    prepared = masking_utils._preprocess_mask_arguments

    def unless_made(config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(attention_mask, kind):
            return prepared(config, inputs_embeds, attention_mask, *args, **kwargs)
        of_four_dims = torch.empty(1, 1, 1, 1, device="meta")  # which transformers takes for a ready-made mask
        leaves, _, *rest = prepared(config, inputs_embeds, of_four_dims, *args, **kwargs)
        return leaves, attention_mask, *rest

    with (
        attribute_replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        attribute_replaced(masking_utils, "_preprocess_mask_arguments", unless_made),
    ):
        yield
