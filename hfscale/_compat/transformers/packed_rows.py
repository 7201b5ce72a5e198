"""Packed rows (several documents in one row): find the documents, and separate them in transformers' masks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import and_masks

from ..replaced import attribute_replaced
from .implementations import implementation_of

within_packing = ContextVar("whether a packing() that knows the documents is active", default=False)
documents_here: ContextVar[Tensor | None] = ContextVar(
    "its document of each token, [1 or b, s]", default=None
)


def text_positions(position_ids: Tensor) -> Tensor | None:
    """Return the positions ``[1 or b, s]`` in which transformers searches for documents; ``None`` if there are none.
    Vision models take positions ``[3, b, s]``, or ``[4, b, s]`` with the text's positions first.
    """
    if position_ids.ndim == 2:
        return position_ids
    return position_ids[0] if len(position_ids) == 4 else None


def begins_anew(position_ids: Tensor, attention_mask: Any = None) -> Tensor:
    """Return flags ``[b, s - 1]``, for all tokens but the first, that are true where a document begins within its row.
    As in transformers, a document begins where a position is not its predecessor plus one. With a padding mask,
    transformers assumes one document per row. This function does not: with a mask, a document begins where the
    positions of two attended neighbours do not increase.
    """
    steps = position_ids.diff(dim=-1)
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        return steps != 1
    tokens = position_ids.shape[-1]  # masks may begin with a cache's or prefix's tokens
    attended = attention_mask[:, -tokens:].to(position_ids.device) != 0
    return (steps <= 0) & attended[:, 1:] & attended[:, :-1]


def documents_of(position_ids: Tensor, attention_mask: Any = None) -> Tensor:
    """Return the index of each token's document, ``[b, s]``, counted from 0 in each row."""
    return nn.functional.pad(begins_anew(position_ids, attention_mask).cumsum(-1), (1, 0))


def starts_of(documents: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return where each row's documents begin (one tuple if equal in all rows), given indices ``[b, s]``.
    Synchronizes.
    """
    starts = tuple(tuple((row.diff().nonzero().flatten() + 1).tolist()) for row in documents.cpu())
    return starts[:1] if len(set(starts)) == 1 else starts


def told_apart_by(batch: Mapping[str, Any]) -> str:
    """Return which argument of a batch may tell where documents begin within a row, judged by shapes alone.

    ``"positions"``: positions of a text. ``"axes"``: positions in time, height and width, in which transformers
    searches for no documents. ``"mask"``: a mask ``[b, h, s, s]`` without positions. The empty string: no such
    argument.
    """
    positions = batch.get("position_ids")
    mask = batch.get("attention_mask")
    if isinstance(positions, Tensor):
        tokens = positions.shape[-1]
        kind = "axes" if text_positions(positions) is None else "positions"
        return kind if tokens > 1 and positions.ndim in (2, 3) else ""
    square = isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == mask.shape[-2] > 1
    return "mask" if square else ""


def holds_documents(batch: Mapping[str, Any]) -> Tensor | None:
    """Return a scalar flag: whether any row holds several documents; ``None`` if the batch cannot hold several."""
    kind = told_apart_by(batch)
    positions: Any = batch.get("position_ids")
    mask: Any = batch.get("attention_mask")
    if not kind:
        return None
    if kind == "mask":
        seen = mask > -1.0 if mask.is_floating_point() else mask != 0
        itself, before, after = (seen.diagonal(offset, -2, -1) for offset in (0, -1, 1))
        return (itself[..., 1:] & itself[..., :-1] & ~before & ~after).any()
    # Within a document, time never decreases, and no two tokens are at the same place.
    if kind == "axes":
        steps = positions.diff(dim=-1)
        begins = (steps[0] < 0) | (steps == 0).all(0)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            attended = mask[:, -positions.shape[-1] :].to(begins.device) != 0
            begins = begins & attended[:, 1:] & attended[:, :-1]
        return begins.any()
    of_text: Any = text_positions(positions)
    return begins_anew(of_text, mask).any()


def keep_documents_apart(
    function: Callable[..., Tensor], position_ids: Tensor, documents: Tensor
) -> Callable[..., Tensor]:
    """Return the mask function ``function``, changed such that no token attends to another document. ``position_ids``
    and ``documents`` (each token's document index) are ``[b, s]``.
    """
    # Newer versions of transformers count windows and chunks from the beginning of an example.
    remapped: Any = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    within = function if remapped is None else remapped(function, position_ids)
    return and_masks(within, masking_utils.packed_sequence_mask_function(documents))


def uses_flash_attention(model: Any) -> bool:
    """Return whether attention is a flash kernel, of any version; such kernels take the lengths of texts in a row."""
    config = model.config.get_text_config()
    return "flash" in implementation_of(config)


@contextmanager
def packing(restarts: bool | None, batch: Mapping[str, Any]) -> Iterator[None]:
    """Separate the documents of packed rows in transformers' attention masks during a forward pass of ``batch`` (the
    ``with`` block). ``restarts`` tells whether positions restart within rows, so that rows hold several documents.

    With ``restarts=None``, transformers itself searches for documents in the positions that the model passes to its
    mask functions. But many models pass none, and each search synchronizes with the device.
    """
    if restarts is None:
        yield
        return
    look = masking_utils.find_packed_sequence_indices
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    given = batch.get("position_ids") is not None

    def known(position_ids: Tensor) -> Tensor | None:
        # Positions that transformers counts are equal in all rows. A model that gets no positions may count its own,
        # which differ between rows.
        other = not restarts and not given and len(position_ids) > 1 and position_ids.stride(0)
        return look(position_ids) if other else None

    made = _DocumentMasks(masks, batch) if restarts else None
    token = within_packing.set(True)
    documents = documents_here.set(None if made is None else made.documents)
    try:
        with (
            attribute_replaced(masking_utils, "find_packed_sequence_indices", known),
            attribute_replaced(masking_utils, "ALL_MASK_ATTENTION_FUNCTIONS", made or masks),
        ):
            yield
    finally:
        within_packing.reset(token)
        documents_here.reset(documents)


class _DocumentMasks:
    """Wrap transformers' mask functions so that each also separates the documents of one batch."""

    def __init__(self, masks: Any, batch: Mapping[str, Any]) -> None:
        self._masks = masks
        positions = text_positions(batch["position_ids"])
        assert positions is not None  # earlier code has found documents in the positions
        self._positions = positions
        self.documents = documents_of(positions, batch.get("attention_mask"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._masks, name)

    def __getitem__(self, implementation: str) -> Callable[..., Any]:
        made = self._masks[implementation]
        tokens = self._positions.shape[-1]

        def by_document(
            *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **kwargs: Any
        ) -> Any:
            if q_length == kv_length == tokens:
                mask_function = keep_documents_apart(
                    mask_function,
                    self._positions.expand(batch_size, -1),
                    self.documents.expand(batch_size, -1),
                )
                # A mask that transformers may skip has to be made here.
                kwargs |= {name: False for name in kwargs if name.endswith("skip")}
            kwargs |= {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
            return made(mask_function=mask_function, **kwargs)

        return by_document
