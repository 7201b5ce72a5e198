"""Find how a batch marks the documents in a packed row: by ``position_ids``, by cumulative lengths for flash attention,
or by a mask with a number for each document.
"""

import inspect
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError

_tell_once = lru_cache(logging.getLogger(__name__).warning)
# Transformers' FlashAttentionKwargs.
LENGTHS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)


def numbers_documents(batch: Mapping[str, Any], zero: Tensor) -> Tensor:
    """Return 1 if a batch's mask has a different number for each document of a row, and there are no ``position_ids``;
    otherwise 0. The result is a tensor like ``zero``, so that the CPU does not wait for the device.
    """
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or batch.get("position_ids") is not None:
        return zero
    if mask.ndim != 2 or mask.dtype == torch.bool or not mask.numel():
        return zero
    return (mask.amax() > 1).to(zero.device, zero.dtype)


def has_numbered_documents(batch: Mapping[str, Any]) -> bool:
    """Return whether a batch's mask has a different number for each document of a row, and there are no
    ``position_ids``. The CPU waits for the device of the mask.
    """
    return bool(numbers_documents(batch, torch.zeros((), dtype=torch.int64)))


def tell_of_numbers() -> None:
    """Warn, once per process, that transformers ignores the numbers of a mask that has a different number for each
    document of a row.
    """
    _tell_once(
        "attention_mask has numbers above 1, as if it numbered the documents of a row: transformers treats every "
        "number except 0 as 1, so documents would attend to each other; give position_ids that begin anew with each "
        "document"
    )


def refuse_lengths_alone(batch: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` if a batch marks several documents in a row only by their cumulative lengths
    (``cu_seq_lens_q``), without ``position_ids``.
    """
    lengths = batch.get(LENGTHS[0])
    if isinstance(lengths, Tensor) and len(lengths) > 2 and batch.get("position_ids") is None:
        raise ConfigError(
            f"{LENGTHS[0]} separates {len(lengths) - 1} documents in a row, but without position_ids most models "
            "continue to count positions from one document to the next: give position_ids too "
            "(return_position_ids=True of the collator)"
        )


def with_document_lengths(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a packed batch with the arguments by which flash attention keeps documents apart (``cu_seq_lens_q``, ...),
    computed from ``position_ids``. Raise :class:`ConfigError` for a batch of several rows if the model does not accept
    these arguments.

    Without them, transformers derives document boundaries from ``position_ids`` with a device synchronization in every
    layer if there is one row, and attends across documents if there are several rows.
    """
    if batch.get("attention_mask") is not None or any(
        batch.get(name) is not None for name in LENGTHS
    ):
        return dict(batch)
    rows = max(
        len(batch[name])
        for name in ("input_ids", "inputs_embeds", "labels")
        if batch.get(name) is not None
    )
    if all(
        kind.kind != kind.VAR_KEYWORD
        for kind in inspect.signature(model.forward).parameters.values()
    ):
        if rows == 1:
            return dict(batch)
        raise ConfigError(
            f"{type(model).__name__} does not accept the boundaries of documents in {rows} packed rows, so flash "
            "attention would attend across documents: use microbatches of one row, or attn_implementation='sdpa'"
        )
    positions = batch["position_ids"].cpu().expand(rows, -1)
    begins = nn.functional.pad(
        positions.diff(dim=-1) != 1,
        (1, 0),
        value=True,
    ).flatten()
    starts = nn.functional.pad(
        begins.nonzero().squeeze(1),
        (0, 1),
        value=begins.numel(),
    ).to(torch.int32)
    longest = int(starts.diff().max())
    return {
        **batch,
        **dict(zip(LENGTHS, (starts, starts, longest, longest), strict=True)),
    }
