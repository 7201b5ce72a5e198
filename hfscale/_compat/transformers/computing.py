"""Attention functions, masks and recomputation of stock models.

Transformers finds attention functions and masks by the name of the attention implementation in a config. Names that
hfscale registers wrap transformers' implementations: every case that hfscale does not handle goes to the wrapped
function, bit for bit.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask
from transformers import AttentionInterface, AttentionMaskInterface, Cache, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    padding_mask_function as leave_out_padding,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..replaced import attribute_replaced
from .caches import CACHES
from .classes import takes_argument
from .implementations import note_host

__all__ = ["and_masks", "leave_out_padding"]

causal_mask_function: Any = masking_utils.causal_mask_function
"""The mask function of a plain causal decoder; transformers passes this same object, so it can be compared."""

Attend = Callable[..., Any]
"""``(stock function, module, query, key, value, mask, **kwargs)`` -> the stock function's result."""
MakeMask = Callable[..., Any]
"""A function that makes an attention mask: ``(stock function, reads_all, **kwargs)`` -> mask. With ``reads_all``, a
query whose keys are all masked attends to all of them.
"""
_READS_ALL = ("eager",)
"""Attention implementations that mask a key by adding a large negative number to its score, so that a query whose keys
are all masked attends to all of them.
"""
encoder_outputs: Callable[[Tensor], Any] = BaseModelOutput
"""Wrap an encoder's hidden states so that an encoder-decoder takes them instead of running its encoder."""


def place_by_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Turn a mask function of one example, head, query and key position into a function of index tensors that broadcast
    (``[b, 1, 1, 1]``, ...).
    """

    def spread(*indices: Tensor) -> Tensor:
        flat = [index.flatten() for index in indices]
        examples, heads, queries, keys = (len(leaf) for leaf in flat)

        def at(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            places = (example, head, query, key)
            return function(*(leaf[place] for leaf, place in zip(flat, places, strict=True)))

        return create_mask(at, examples, heads, queries, keys, device=flat[0].device)

    return spread


def _stock_mask(
    host: Callable[..., Any],
    fills: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return host(*args, **kwargs)


def answer(prefix: str, host: str, attend: Attend, make_mask: MakeMask = _stock_mask) -> str:
    """Register a new attention implementation that wraps transformers' implementation ``host``: ``attend`` computes
    attention, and ``make_mask`` makes masks. Both get ``host``'s function as first argument. Return the new name.
    """
    name = f"{prefix}{host}"

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> Any:
        return attend(
            _function_of(host, module), module, query, key, value, attention_mask, **kwargs
        )

    def mask(*args: Any, **kwargs: Any) -> Any:
        return make_mask(ALL_MASK_ATTENTION_FUNCTIONS[host], host in _READS_ALL, *args, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    note_host(name, host)
    return name


def _function_of(host: str, module: nn.Module) -> Callable[..., Any]:
    """Return the stock attention function; the eager one comes from the file of the module's class or a base class."""
    files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
    eager: Any = next(
        (f for file in files if (f := getattr(file, "eager_attention_forward", None)) is not None),
        None,
    )
    return ALL_ATTENTION_FUNCTIONS.get_interface(host, eager)


@contextmanager
def masks_made_here(kind: type) -> Iterator[None]:
    """Let transformers use attention masks of the class ``kind`` unchanged inside the ``with`` block, and let it not
    search ``position_ids`` for packed examples.
    """
    prepared = masking_utils._preprocess_mask_arguments

    def unless_made(
        config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(attention_mask, kind):
            return prepared(config, inputs_embeds, attention_mask, *args, **kwargs)
        # A tensor of four dims, which transformers takes for a ready-made mask.
        of_four_dims = torch.empty(1, 1, 1, 1, device="meta")
        leaves, _, *rest = prepared(config, inputs_embeds, of_four_dims, *args, **kwargs)
        return leaves, attention_mask, *rest

    with (
        attribute_replaced(
            masking_utils, "find_packed_sequence_indices", lambda position_ids: None
        ),
        attribute_replaced(masking_utils, "_preprocess_mask_arguments", unless_made),
    ):
        yield


def position_counter(model: nn.Module) -> Callable[[Mapping[str, Any]], Tensor | None]:
    """Return a function that returns, for a batch, the positions ``[1 or b, s]`` that the model would count by itself:
    from 0, or (in models like RoBERTa) from the token after ``padding_idx``. The function returns ``None`` if the model
    takes no positions, or if the batch already has them.
    """
    takes_positions = takes_argument(model, "position_ids")
    names = {name: f"create_position_ids_from_{name}" for name in ("input_ids", "inputs_embeds")}
    own = next(
        (
            module
            for module in model.modules()
            if all(hasattr(module, name) for name in names.values())
        ),
        None,
    )
    # If positions have axes (of pictures), transformers counts positions for every row.
    by_axes = any(hasattr(module, "mrope_section") for module in model.modules())

    def count(batch: Mapping[str, Any]) -> Tensor | None:
        name = next((name for name in names if isinstance(batch.get(name), Tensor)), None)
        if name is None or not takes_positions or batch.get("position_ids") is not None:
            return None
        if own is None:
            return torch.arange(batch[name].shape[1]).expand(len(batch[name]) if by_axes else 1, -1)
        positions: Tensor = getattr(own, names[name])(batch[name], own.padding_idx)
        return positions

    return count


def stays_in_32_bits(model: Any) -> Callable[[str], bool]:
    """Return a predicate for names: whether transformers keeps the parameter in 32 bits when it loads the
    model in 16.
    """
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    pattern = re.compile("|".join(each.replace("*", ".*") for each in kept))
    return lambda name: bool(kept) and pattern.search(name) is not None


def recomputes(modules: Iterable[nn.Module]) -> bool:
    """Return whether any of these modules recomputes its activations in the backward pass."""
    return any(vars(module).get("gradient_checkpointing", False) for module in modules)


def without_cache(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments without the key/value cache: when the layer is recomputed in the backward pass, it
    would append the same keys and values to the cache again.
    """
    emptied = {
        name: None
        for name, value in kwargs.items()
        if isinstance(value, Cache) or (name in CACHES and value is not None)
    }
    off = {"use_cache": False} if kwargs.get("use_cache") else {}
    return tuple(None if isinstance(arg, Cache) else arg for arg in args), {
        **kwargs,
        **emptied,
        **off,
    }


def enable_checkpointing(model: Any, **kwargs: Any) -> None:
    """Enable activation checkpointing, layer by layer, with recomputation that does not re-enter autograd."""
    # transformers renamed this method in 5.2x, and warns about the old name.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False, **kwargs})
