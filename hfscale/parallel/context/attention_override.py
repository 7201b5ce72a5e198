"""Replace the attention of a stock model by attention over sharded sequences.

Inside :meth:`AttentionOverride.passing` the model computes this rank's tokens only. transformers' mask function then
returns a :class:`MaskBlocks`, which every later layer receives as an argument. Recomputed layers and several forward
passes in flight therefore need no other state. Attention with a ``MaskBlocks`` is computed here; attention with any
other mask, or outside ``passing``, is computed by transformers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..._compat.transformers.caches import CACHES
from ..._compat.transformers.classes import class_name
from ..._compat.transformers.computing import (
    answer,
    causal_mask_function,
    masks_made_here,
    place_by_place,
)
from ..._compat.transformers.implementations import (
    asks_for_attention,
    implementation_of,
    set_implementation,
)
from ...config.parallel import UNCUT_SEQUENCES
from ...errors import ConfigError
from .cut_batch import CutBatch, MaskBlocks

_PREFIX = "hfscale_"
_SAID = {
    *CACHES,
    "sliding_window",
    "position_ids",
    "is_causal",
    "use_cache",
    "cache_position",
    "position_embeddings",
    "num_items_in_batch",
    "return_dict",
    "labels",
    "shift_labels",
    "logits_to_keep",
    "output_attentions",
    "output_router_logits",
    "output_hidden_states",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}
"""Arguments of an attention call that add no information to the mask, and are ignored."""


@dataclass(frozen=True)
class AttentionCall:
    """Hold the arguments of one attention call other than the tensors q, k, v and the mask."""

    scale: float
    # scores become ``softcap * tanh(scores / softcap)``; ``None``: no softcap
    softcap: float | None
    dropout: float
    # ``[h]``: per head, the logit of a key that has no value; ``None``: no sinks
    sinks: Tensor | None


Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, MaskBlocks, AttentionCall], Tensor]
"""Type of the function that computes one attention call: ``(module, q, k, v, mask, call)`` -> output. ``q`` and the
output are ``[batch, query heads, tokens, head dim]``, ``k`` and ``v`` ``[batch, key/value heads, tokens, head dim]``.
"""


@dataclass
class _Passage:
    batch: CutBatch
    attend: Attend


_passage: ContextVar[_Passage | None] = ContextVar("a pass over parts of sequences", default=None)


class AttentionOverride:
    """Replace transformers' attention in one model: in each of ``configs``, set hfscale's attention implementation."""

    def __init__(self, configs: list[Any]) -> None:
        self._configs = [(config, implementation_of(config)) for config in configs]
        for config, host in self._configs:
            set_implementation(config, answer(_PREFIX, host, _attention, _mask))

    def leave_out(self, module: nn.Module) -> None:
        """Leave one module to transformers' attention, also inside ``passing``: its config becomes a copy with the
        original implementation.
        """
        hosts = {id(config): host for config, host in self._configs}
        for inner in module.modules():
            if (host := hosts.get(id(getattr(inner, "config", None)))) is not None:
                inner.config = copy(inner.config)
                set_implementation(inner.config, host)

    def remove(self) -> None:
        """Restore transformers' attention."""
        for config, host in self._configs:
            set_implementation(config, host)

    @contextmanager
    def passing(self, batch: CutBatch, attend: Attend) -> Iterator[None]:
        """Compute attention for this rank's tokens of ``batch``, by calling ``attend``, inside the with block."""
        token = _passage.set(_Passage(batch, attend))
        try:
            with masks_made_here(MaskBlocks):
                yield
        finally:
            _passage.reset(token)


def current_batch() -> CutBatch | None:
    """Return the full sequences of the current forward pass; ``None`` outside :meth:`AttentionOverride.passing`."""
    passage = _passage.get()
    return None if passage is None else passage.batch


def attending() -> Attend | None:
    """Return the attention function of the current forward pass; ``None`` outside :meth:`AttentionOverride.passing`."""
    passage = _passage.get()
    return None if passage is None else passage.attend


def learn(batch: CutBatch) -> None:
    """Replace the batch of the current forward pass by one that has more information, such as positions that the model
    has computed.
    """
    passage = _passage.get()
    assert passage is not None
    passage.batch = batch


def attention_configs(model: Any) -> list[Any]:
    """Return the config objects from which the attention modules of ``model`` read their implementation."""
    text = model.config.get_text_config()
    configs = {id(text): text}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and type(config) is type(text) and asks_for_attention(config):
            configs.setdefault(id(config), config)
    return list(configs.values())


def _mask(
    host: Callable[..., Any],
    fills: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    passage = _passage.get()
    if passage is None:
        return host(*args, **kwargs)
    function = kwargs["mask_function"]
    # transformers would call the function with one pair of positions at a time
    if kwargs.get("use_vmap"):
        function = place_by_place(function)
    total = passage.batch.split.total
    # The mask function replaces these arguments: padding is part of it.
    said = {
        "attention_mask": None,
        "use_vmap": False,
        "allow_is_bidirectional_skip": False,
    }
    whole = {**kwargs, **said, "q_length": total, "kv_length": total}

    def dense(function: Callable[..., Tensor]) -> Any:
        skips = kwargs.get("allow_is_causal_skip", False) and function is causal_mask_function
        return host(*args, **{**whole, "mask_function": function, "allow_is_causal_skip": skips})

    every = MaskBlocks(
        passage.batch, function, kwargs["batch_size"], kwargs["device"], passage.attend, dense
    )
    mask = every.of_examples()
    return mask.filled() if fills and passage.batch.padding is not None else mask


def _attention(
    host: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **kwargs: Any,
) -> Any:
    if not isinstance(mask, MaskBlocks):
        if _passage.get() is not None:
            raise ConfigError(
                f"{class_name(module)} attends with a mask of its own ({type(mask).__name__}), which cannot be sharded "
                f"along the sequence: use {UNCUT_SEQUENCES}"
            )
        return host(module, query, key, value, mask, **kwargs)
    own = mask.batch.split.length(mask.batch.rank)
    if not query.shape[2] == key.shape[2] == own:
        raise ConfigError(
            f"{class_name(module)} must compute one query and one key for each of the {own} tokens that this context "
            f"rank has, got {query.shape[2]} queries and {key.shape[2]} keys: use {UNCUT_SEQUENCES}"
        )
    given = {name: value for name, value in kwargs.items() if value is not None}
    scale, softcap = (
        None if (x := given.pop(name, None)) is None else float(x)
        for name in ("scaling", "softcap")
    )
    sinks = given.pop("s_aux", None)
    dropout = float(given.pop("dropout", 0.0))
    if unknown := [name for name in given if name not in _SAID]:
        raise ConfigError(
            f"{class_name(module)} passes arguments to attention that hfscale does not know ({', '.join(unknown)}), "
            "so attention over sharded sequences could compute something else than stock attention: use "
            f"{UNCUT_SEQUENCES}"
        )
    call = AttentionCall(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        dropout=dropout if module.training else 0.0,
        sinks=getattr(module, "sinks", None) if sinks is None else sinks,
    )
    return mask.attend(module, query, key, value, mask, call).transpose(1, 2).contiguous(), None
