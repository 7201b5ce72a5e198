"""Replace the attention of a stock model by attention over cut sequences.

Inside :meth:`AttentionOverride.passing` the model computes its own tokens only. The mask that it makes is a
:class:`MaskBlocks`, an argument of every later layer, so that recomputed layers and several passes in flight need no
other state; attention with such a mask is computed here. Outside, and with any other mask, transformers computes it.
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
    "sliding_window",
    "position_ids",
    "is_causal",
    "use_cache",
    "cache_position",
    "position_embeddings",
}
_SAID |= {
    *CACHES,
    "num_items_in_batch",
    "return_dict",
    "labels",
    "logits_to_keep",
    "output_attentions",
}
_SAID |= {
    "output_router_logits",
    "output_hidden_states",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
}
_SAID |= {"max_length_k"}
"""Arguments of an attention call that say nothing that its mask does not."""


@dataclass(frozen=True)
class AttentionCall:
    """Hold the scaling of one attention call."""

    scale: float
    softcap: float | None  # bound of the scores after tanh; ``None``: no softcap
    dropout: float
    sinks: Tensor | None  # ``[h]`` logits of a key without value; ``None``: no sinks


Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, MaskBlocks, AttentionCall], Tensor]
"""``(module, q [b, h, s, d], k, v [b, h / g, s, d], mask, call)`` -> ``[b, h, s, d]``."""


@dataclass
class _Passage:
    batch: CutBatch
    attend: Attend


_passage: ContextVar[_Passage | None] = ContextVar("a pass over parts of sequences", default=None)


class AttentionOverride:
    """Replace the attention of one model."""

    def __init__(self, configs: list[Any]) -> None:
        self._configs = [(config, implementation_of(config)) for config in configs]
        for config, host in self._configs:
            set_implementation(config, answer(_PREFIX, host, _attention, _mask))

    def leave_out(self, module: nn.Module) -> None:
        """Let a module attend by transformers' own functions, in a pass too: its config is a copy that names them."""
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
        """Run attention over this rank's part of ``batch`` inside the with block."""
        token = _passage.set(_Passage(batch, attend))
        try:
            with masks_made_here(MaskBlocks):
                yield
        finally:
            _passage.reset(token)


def current_batch() -> CutBatch | None:
    """Return the full sequences that the current pass computes a part of; ``None`` outside of one."""
    passage = _passage.get()
    return None if passage is None else passage.batch


def attending() -> Attend | None:
    """Return what computes the attention of the current pass; ``None`` outside of one."""
    passage = _passage.get()
    return None if passage is None else passage.attend


def learn(batch: CutBatch) -> None:
    """Replace the batch of the current pass by one with more information."""
    passage = _passage.get()
    assert passage is not None
    passage.batch = batch


def attention_configs(model: Any) -> list[Any]:
    """Return the config objects that the attention modules of a text model read."""
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
    if kwargs.get("use_vmap"):  # which the host does not know to take more than one place at a time
        function = place_by_place(function)
    total = passage.batch.split.total
    # By the function.
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
                f"{class_name(module)} attends with a mask of its own ({type(mask).__name__}): use {UNCUT_SEQUENCES}"
            )
        return host(module, query, key, value, mask, **kwargs)
    own = mask.batch.split.length(mask.batch.rank)
    if not query.shape[2] == key.shape[2] == own:
        raise ConfigError(
            f"{class_name(module)} has {query.shape[2]} queries and {key.shape[2]} keys of {own} tokens: use "
            f"{UNCUT_SEQUENCES}"
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
            f"{class_name(module)} passes unknown arguments to attention: {', '.join(unknown)}: "
            f"use {UNCUT_SEQUENCES}"
        )
    call = AttentionCall(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
        dropout=dropout if module.training else 0.0,
        sinks=getattr(module, "sinks", None) if sinks is None else sinks,
    )
    return mask.attend(module, query, key, value, mask, call).transpose(1, 2).contiguous(), None
