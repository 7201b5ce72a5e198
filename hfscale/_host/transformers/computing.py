"""How a stock model computes: attention, packed rows, recomputation."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from torch import Tensor, nn
from transformers import Cache, masking_utils
from transformers.modeling_outputs import BaseModelOutput

from .attention import keep_documents_apart

_within = ContextVar("within packing", default=False)


def uses_flash_attention(model: Any) -> bool:
    """Whether attention is a flash kernel's, of whatever version or origin, which is told of borders by lengths."""
    config = model.config.get_text_config()
    return "flash" in str(getattr(config, "_attn_implementation", None))


def text_positions(position_ids: Tensor) -> Tensor | None:
    """Return the positions ``[1 or b, s]`` in which the host looks for documents; ``None``: it has none.

    Models of pictures take ``[3, b, s]``, or with the positions of the text in front ``[4, b, s]``.
    """
    if position_ids.ndim == 2:
        return position_ids
    return position_ids[0] if len(position_ids) == 4 else None


def begins_anew(position_ids: Tensor, attention_mask: Any = None) -> Tensor:
    """Return where a document begins within its row: ``[b, s - 1]`` flags for the tokens behind the first.

    As in the host, where a position is not the one before plus one. With a padding mask, with which the host sees one
    document per row: where the positions of two attended neighbours do not increase.
    """
    steps = position_ids.diff(dim=-1)
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return steps != 1
    attended = attention_mask.to(position_ids.device) != 0
    return (steps <= 0) & attended[:, 1:] & attended[:, :-1]


@contextmanager
def packing(restarts: bool | None, batch: Mapping[str, Any]) -> Iterator[None]:
    """Context manager in which the host's masks keep the documents of packed rows apart.

    The host finds documents in the positions that a model hands to its mask functions, which many models do not, and
    asks the device for them in every pass. Here masks of every kind are made from the positions of ``batch``.

    Args:
        restarts: whether the positions of ``batch`` begin anew within its rows; ``None``: the host has to look.
        batch: the arguments of the forward pass.
    """
    if restarts is None:
        yield
        return
    token = _within.set(True)
    look, masks = masking_utils.find_packed_sequence_indices, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    given = batch.get("position_ids") is not None

    def known(position_ids: Tensor) -> Tensor | None:
        # The host's own positions are alike in all rows; a model may make others, where the caller gives none.
        other = not restarts and not given and len(position_ids) > 1 and position_ids.stride(0)
        return look(position_ids) if other else None

    masking_utils.find_packed_sequence_indices = known
    if restarts:
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS = cast(Any, _DocumentMasks(masks, batch))
    try:
        yield
    finally:
        _within.reset(token)
        masking_utils.find_packed_sequence_indices, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS = look, masks


def is_within_packing() -> bool:
    """Return whether a :func:`packing` context that knows the documents is active."""
    return _within.get()


class _DocumentMasks:
    """The host's table of mask functions, each of which also keeps the documents of one batch apart."""

    def __init__(self, masks: Any, batch: Mapping[str, Any]) -> None:
        self._masks = masks
        positions = text_positions(batch["position_ids"])
        assert positions is not None  # in which documents were found
        begins = begins_anew(positions, batch.get("attention_mask"))
        self._positions, self._documents = positions, nn.functional.pad(begins.cumsum(-1), (1, 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._masks, name)

    def __getitem__(self, implementation: str) -> Callable[..., Any]:
        made, tokens = self._masks[implementation], self._positions.shape[-1]

        def by_document(*, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **kwargs: Any) -> Any:
            if q_length == kv_length == tokens:
                mask_function = keep_documents_apart(
                    mask_function, self._positions.expand(batch_size, -1), self._documents.expand(batch_size, -1)
                )
                kwargs |= {name: False for name in kwargs if name.endswith("_skip")}  # the mask has to be made
            kwargs |= {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
            return made(mask_function=mask_function, **kwargs)

        return by_document


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
