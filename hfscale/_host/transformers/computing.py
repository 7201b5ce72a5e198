"""How a stock model computes: attention, packed rows, recomputation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, masking_utils
from transformers.modeling_outputs import BaseModelOutput


def uses_flash_attention(model: Any) -> bool:
    """Whether attention is a flash kernel's, of whatever version or origin, which is told of borders by lengths."""
    config = model.config.get_text_config()
    return "flash" in str(getattr(config, "_attn_implementation", None))


def number_examples(position_ids: Tensor) -> Tensor:
    """``[b, s]`` positions that begin anew with each example of a row -> which example of its row each token is in."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


@contextmanager
def packing(restarts: bool | None, given: bool) -> Iterator[None]:
    """Within: the host is told whether positions restart within rows, instead of asking the device in every pass.

    Args:
        restarts: ``None``: it is to ask.
        given: whether positions are the caller's. The host's own, which are alike in all rows, do not restart; of any
            others it asks.
    """
    if restarts is None:
        yield
        return
    original = masking_utils.find_packed_sequence_indices

    def known(position_ids: Tensor) -> Tensor | None:
        if not given and len(position_ids) > 1 and position_ids.stride(0):
            return original(position_ids)
        if not restarts:
            return None
        return number_examples(position_ids)

    masking_utils.find_packed_sequence_indices = known
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


def recomputes(model: Any) -> bool:
    """Whether activations of some layers are recomputed in the backward pass."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a layer without the cache of keys and values, which a recomputation would fill once more; some
    layers are given it by position.
    """
    emptied = {
        name: None for name in ("past_key_values", "past_key_value", "layer_past") if kwargs.get(name) is not None
    }
    off = {"use_cache": False} if kwargs.get("use_cache") else {}
    return tuple(None if isinstance(arg, Cache) else arg for arg in args), {**kwargs, **emptied, **off}


def enable_checkpointing(model: Any, **kwargs: Any) -> None:
    """Recompute activations in the backward pass, layer by layer, without re-entering autograd."""
    # The host renamed it in 5.2x and warns about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, **kwargs})


def encoder_outputs(states: Tensor) -> Any:
    """What an encoder has made, for an encoder-decoder that is not to run its own."""
    return BaseModelOutput(last_hidden_state=states)
