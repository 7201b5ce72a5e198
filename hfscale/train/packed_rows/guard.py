"""Raise an error for models that cannot keep packed documents apart: several documents in one row, marked by
``position_ids`` or a mask.

No document may change the result of another document. In every family, attention separates documents by masks that are
made from the positions (``packing``), and supported recurrences and convolutions restart at each document
(:class:`PackedRows`). Other recurrences, and positions that the model counts itself, would continue from one document
to the next, so such models raise an error before their first packed step. They are found once per class and config: a
tiny copy of the model gets the documents in one row, and then one by one. Some configs name a length above which the
model computes differently. If a row is longer than this length, a second copy with a smaller length is tried.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.classes import stock_class
from ..._compat.transformers.packed_rows import (
    documents_here,
    holds_documents,
    packing,
    starts_of,
    text_positions,
    told_apart_by,
    uses_flash_attention,
    within_packing,
)
from ..._compat.transformers.recurrences import reads_by_functions
from ...errors import ConfigError
from ...models.facts import ask
from ...models.fields import lengths_of
from ..runtime import Part, Runtime
from ..runtime.forward_passes import ForwardPasses, recomputing
from ..runtime.shards import LocalWeights
from .facts import has_numbered_documents, tell_of_numbers, with_document_lengths

if TYPE_CHECKING:  # imported only for recurrences and convolutions
    from ...distributed.ops.segments import Segments

_WITHIN_ROW, _WITHIN_DOCUMENT = 8, 5
"""Two small values for a length above which a model computes differently, as tried in a tiny copy of the model. The
test's row is longer than 8 tokens, but each of its documents is not; its longest document is longer than 5 tokens.
"""


def check_packed_rows(
    model: Any,
    batches: Iterable[Mapping[str, Any]] = (),
    start: int = 0,
    tokens: int | None = None,
) -> None:
    """Raise :class:`ConfigError` if a tiny copy of the model computes other logits for documents in one row than for
    the same documents one by one.

    Args:
        batches: packed batches, which show how documents are marked. If there are none, documents are marked by
            positions.
        start: the first position of a document.
        tokens: the length of the longest row, if there are no batches.
    """
    batches = list(batches)
    kinds = {told_apart_by(batch) for batch in batches} - {""} or {"positions"}
    if "axes" in kinds:
        raise ConfigError(
            "position_ids of three axes (time, height and width) begin anew within a row, but transformers finds "
            "documents only by text positions: give position_ids of shape [4, rows, tokens] with text positions "
            "first, or give every document its own row"
        )
    told = (batch.get("position_ids", batch.get("attention_mask")) for batch in batches)
    longest = max(
        (each.shape[-1] if isinstance(each, Tensor) else 0 for each in told), default=tokens or 0
    )
    for kind in sorted(kinds):
        positions = [
            text_positions(each["position_ids"])
            for each in batches
            if told_apart_by(each) == "positions"
        ]
        given = [each for each in positions if each is not None and kind == "positions"]
        _refuse(model, kind, start, longest, given)


def _refuse(
    model: Any,
    kind: str,
    start: int,
    longest: int,
    given: list[Tensor],
) -> None:
    """Raise :class:`ConfigError` if documents in the same row affect each other in this model, in rows of up to
    ``longest`` tokens. ``kind`` is how documents are marked: ``"positions"`` or ``"mask"``.
    """
    made = stock_class(model)
    flash = uses_flash_attention(model)
    masked = kind == "mask"

    def found(name: str = "", length: int = 0) -> str:
        about = (
            f"from {start}{' by mask' if masked else ''}{' by flash attention' if flash else ''}"
        )
        about += f" with {name} {length}" if name else ""
        given = {"flash": flash, "masked": masked, "start": start, "name": name, "length": length}
        return ask("documents", model, about, stock=made, kind=made, **given)

    why = found()
    where = ""
    # RoBERTa's positions begin above 0, so try again from the first position of the batch.
    if why and given and (first := min(int(positions.min()) for positions in given)) > 0:
        start = first
        why = found()
    if not why:
        why, where = _beyond_lengths(
            lengths_of(model.config), found, longest, [positions - start for positions in given]
        )
    if why:
        told = (
            "position_ids that begin anew within the row"
            if kind == "positions"
            else "a mask without position_ids"
        )
        raise ConfigError(
            f"documents in one row, separated by {told}, must not affect each other, but in {made.__name__} they "
            f"do{where} ({why}): give every document its own row (packing=False, padding_free=False, "
            "data.packing=false, a collator that "
            f"pads){'' if kind == 'positions' else ', or give position_ids'}{', or shorter rows' if where else ''}"
        )


def _beyond_lengths(
    lengths: Mapping[str, int],
    found: Callable[..., str],
    longest: int,
    given: list[Tensor],
) -> tuple[str, str]:
    """Test whether documents in the same row affect each other only in rows, or documents, longer than one of the
    config's ``lengths`` (such as a sliding window). Return a text about the difference and a text that names the
    length; both are empty if there is no difference. The CPU may wait for the device of the positions.
    """
    for name, length in lengths.items():
        if longest <= length:
            continue
        if why := found(name=name, length=_WITHIN_ROW):
            return why, f" in rows of more than {length} tokens ({name})"
        beyond = found(name=name, length=_WITHIN_DOCUMENT)
        if beyond and any(int(positions.max()) >= length for positions in given):
            return beyond, f" where one has more than {length} tokens ({name})"
    return "", ""


class PackedRows(Part):
    """Keep the documents of packed rows apart in plain loops that call the model without ``train_step``, or raise an
    error if the model cannot.
    """

    def __init__(self) -> None:
        self._passes: ForwardPasses[Segments | None] = ForwardPasses()
        self._passes.begin(None)
        self._documents: Tensor | None = None  # document numbers of the latest pass
        self._looked = False  # whether the first mask of a plain loop was read

    def segments(self) -> "Segments | None":
        """Return where documents begin in the rows of the forward pass that is running; ``None`` if rows are not
        packed. When a layer is recomputed in a backward pass, it is the forward pass to which the layer belongs.
        """
        if recomputing():
            return self._passes.current()
        documents = documents_here.get()
        if documents is not self._documents:
            self._documents = documents
            self._passes.begin(None if documents is None else _segments_of(documents))
        return self._passes.latest

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Add hooks that check the positions in each forward pass outside of training steps, and that restart
        recurrences and convolutions at each document.
        """
        model = runtime.model
        if any(map(reads_by_functions, model.modules())):
            from ...distributed.ops.segments import keep_states_apart

            keep_states_apart(model, self.segments)
        names = list(inspect.signature(stock_class(model).forward).parameters)[1:]  # without self

        def begin(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Any:
            if torch.compiler.is_compiling() or within_packing.get():
                return None
            batch = {**dict(zip(names, args, strict=False)), **kwargs}
            if not self._looked:  # only once, because the CPU waits for the device
                self._looked = True
                if runtime.mesh.speaks_for_batch and has_numbered_documents(batch):
                    tell_of_numbers()
            if not has_packed_rows(batch):
                return None
            check_packed_rows(model, [batch])
            if told_apart_by(batch) != "positions":
                return None
            stack = ExitStack()
            stack.enter_context(packing(True, batch))

            def end(*_: Any) -> None:
                handle.remove()
                stack.close()

            handle = model.register_forward_hook(end, always_call=True)
            return (
                (args, {**kwargs, **with_document_lengths(batch, model)})
                if uses_flash_attention(model)
                else None
            )

        model.register_forward_pre_hook(begin, with_kwargs=True)


def _segments_of(documents: Tensor) -> "Segments":
    from ...distributed.ops.segments import Segments

    return Segments(((0, documents.shape[-1]),), starts_of(documents))


def has_packed_rows(batch: Mapping[str, Any]) -> bool:
    """Return whether positions restart within a row, which then holds several documents. The CPU waits for the device
    of the positions.
    """
    holds = holds_documents(batch)
    return holds is not None and bool(holds)
