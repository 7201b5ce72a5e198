"""Packed rows: several documents in one row of tokens, told apart by ``position_ids`` that begin anew, or by a mask.

No document may change what is computed of another. Attention keeps them apart by masks made from the positions
(``packing``), whatever the family hands to the host's mask functions. Recurrences, convolutions and positions that a
model counts by itself pass from one document to the next: such models are refused before their first packed step.
Which ones do is found out once per class and config, by a tiny copy that is given documents in one row and one by one.
What begins at a length that a config names is tried with a copy that names a shorter one, where a row is longer.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .._host.transformers.attention import answer, set_implementation
from .._host.transformers.classes import stock_class
from .._host.transformers.computing import (
    holds_documents,
    is_within_packing,
    packing,
    text_positions,
    told_apart_by,
    uses_flash_attention,
)
from ..errors import ConfigError
from ..families.clone import VOCABULARY, layers_of_every_kind
from ..families.fields import lengths_of, with_lengths
from ..planner.probe import tiny_model_of
from ..planner.remembered import Remembered, said_by
from ..runtime import Part, Runtime
from ..runtime.batches import BORDERS, with_borders
from ..runtime.local_weights import LocalWeights

_LENGTHS = (1, 6, 1, 4)
_WITHIN_ROW, _WITHIN_DOCUMENT, _NOWHERE = 8, 5, 64
"""Lengths: the row of the proof is longer, and no document; its longest document is, and no other; nothing is."""
_TOLERANCE = 1e-4
"""Relative, in float32. What passes from one document to the next changes these logits by 1e-2 and more."""
_found: Remembered[str] = Remembered()


def check_packed_rows(
    model: Any, batches: Iterable[Mapping[str, Any]] = (), start: int = 0, tokens: int | None = None
) -> None:
    """Refuse packed rows for a model that does not keep their documents apart.

    Args:
        model: a stock model, parallelized or not.
        batches: some of which hold packed rows.
        start: the position of a document's first token, where there are no batches yet.
        tokens: of the longest row, where there are no batches yet.

    Raises:
        ConfigError: a tiny copy of it computes other logits for documents in one row than for each by itself.
    """
    batches = list(batches)
    kinds = {told_apart_by(batch) for batch in batches} - {""} or {"positions"}
    if "axes" in kinds:
        raise ConfigError(
            "position_ids in time, height and width begin anew within a row, and transformers looks for documents in "
            "the positions of a text: give [4, rows, tokens] with these first, or give every document its own row"
        )
    longest = max([batch_tokens(batch) for batch in batches], default=tokens or 0)
    for kind in sorted(kinds):
        positions = [text_positions(each["position_ids"]) for each in batches if told_apart_by(each) == "positions"]
        given = [each for each in positions if each is not None and kind == "positions"]
        _refuse(model, kind, start, longest, given)


def batch_tokens(batch: Mapping[str, Any]) -> int:
    """Return how many tokens a row of a batch has that tells documents apart."""
    told = batch.get("position_ids", batch.get("attention_mask"))
    return told.shape[-1] if isinstance(told, Tensor) else 0


def _refuse(model: Any, kind: str, start: int, longest: int, given: list[Tensor]) -> None:
    """Refuse documents told apart by ``kind``, in rows of up to ``longest`` tokens with the ``given`` positions."""
    made, flash, config = stock_class(model), uses_flash_attention(model), model.config
    said = said_by(config)

    def found(**more: Any) -> str:
        key = (made, said, flash, kind, start, *more.values())
        return _found.answer(key, lambda: _difference(made, config, flash, kind == "mask", start, **more))

    why, where = found(), ""
    if why and given and (first := min(int(positions.min()) for positions in given)) > 0:  # as RoBERTa counts them
        start = first
        why = found()
    if not why:
        why, where = _beyond_lengths(lengths_of(config), found, longest, [positions - start for positions in given])
    if why:
        told = "position_ids that begin anew within it" if kind == "positions" else "a mask, without position_ids"
        raise ConfigError(
            f"documents in one row ({told}) must not affect each other, but in {made.__name__} they do{where} ({why}): "
            "give every document its own row (packing=False, padding_free=False, data.packing=false, a collator that "
            f"pads){'' if kind == 'positions' else ', or give position_ids'}{', or shorter rows' if where else ''}"
        )


def _beyond_lengths(
    lengths: Mapping[str, int], found: Callable[..., str], longest: int, given: list[Tensor]
) -> tuple[str, str]:
    """Return what differs beyond one of the config's ``lengths``, and beyond which; waits for positions if need be."""
    for name, length in lengths.items():
        if longest <= length:
            continue
        if why := found(name=name, length=_WITHIN_ROW):
            return why, f" in rows of more than {length} tokens ({name})"
        beyond = found(name=name, length=_WITHIN_DOCUMENT)
        if beyond and any(int(positions.max()) >= length for positions in given):
            return beyond, f" where one has more than {length} tokens ({name})"
    return "", ""


def _difference(
    kind: Any, config: Any, flash: bool, masked: bool, start: int = 0, name: str = "", length: int = 0
) -> str:
    """Return what differs between documents in one row and one by one; nothing where they are computed alike.

    Args:
        masked: documents are told apart by a mask, and not by positions.
        name: a field of the config that shall say ``length``.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        lengths = dict.fromkeys(lengths_of(config), _NOWHERE) | ({name: length} if name else {})
        shown = with_lengths(config, lengths)
        model = tiny_model_of(kind, shown, torch.float32, layers=layers_of_every_kind(config))
        if model is None:
            return "no tiny copy of it could be made to prove the contrary"
        for parameter in model.parameters():  # first values are so small that layers hardly change anything
            parameter.add_(0.1 * torch.randn_like(parameter))
        if flash:
            set_implementation(model.config.get_text_config(), answer("documents_", "sdpa", _attend, _no_mask))
        ids = torch.randint(3, min(VOCABULARY, 60), (1, sum(_LENGTHS)))
        try:
            parts = [_logits(model.eval(), {"input_ids": part}) for part in ids.split(_LENGTHS, dim=1)]
            found = _in_one_row(model, ids, flash, masked, start)
        except Exception as error:  # whatever stock code says of arguments that it does not take
            return f"{type(error).__name__}: {error}".split("\n")[0][:200]
    expected = torch.cat(parts, dim=1)
    if found.shape != expected.shape:
        return "its logits are not one row per token"
    relative = float((found - expected).abs().max() / expected.abs().max())
    return "" if relative <= _TOLERANCE else f"logits of a tiny copy change by {relative:.1g} of the largest"


def _in_one_row(model: Any, ids: Tensor, flash: bool, masked: bool, start: int) -> Tensor:
    if masked:
        triangles = [torch.ones(length, length, dtype=torch.bool).tril() for length in _LENGTHS]
        return _logits(model, {"input_ids": ids, "attention_mask": torch.block_diag(*triangles).bool()[None, None]})
    positions = torch.cat([torch.arange(length) + start for length in _LENGTHS])[None]
    batch = {"input_ids": ids, "position_ids": positions}
    with packing(True, batch):
        return _logits(model, with_borders(batch, model) if flash else batch)


def _logits(model: Any, batch: Mapping[str, Any]) -> Tensor:
    off = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    logits: Tensor = model(**batch, **off).logits
    return logits


def _attend(host: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Attend as a flash kernel does, which is told of documents by the lengths in ``cu_seq_lens_q`` alone."""
    starts = kwargs.pop(BORDERS[0], None)
    if starts is not None:
        documents = torch.bucketize(torch.arange(q.shape[2]), starts, right=True)
        mask = documents[:, None] == documents
        mask = (mask.tril() if getattr(module, "is_causal", True) else mask)[None, None]
    kwargs.pop("softcap", None)  # which sdpa does not take, and flash kernels do
    return host(module, q, k, v, mask, **kwargs)


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask, as the host does for flash kernels."""


class PackedRows(Part):
    """Documents of packed rows kept apart in plain loops too, or refused there."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Look at the positions of each pass that no step has looked at."""
        model = runtime.model
        names = list(inspect.signature(stock_class(model).forward).parameters)[1:]  # without self
        passes: list[ExitStack] = []

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            stack = ExitStack()
            passes.append(stack)
            if torch.compiler.is_compiling() or is_within_packing():
                return None
            batch = {**dict(zip(names, args, strict=False)), **kwargs}
            if not has_packed_rows(batch):
                return None
            check_packed_rows(model, [batch])
            if told_apart_by(batch) != "positions":
                return None
            stack.enter_context(packing(True, batch))
            return (args, {**kwargs, **with_borders(batch, model)}) if uses_flash_attention(model) else None

        def end(*_: Any) -> None:
            if passes:  # none, where a hook before `begin` has raised
                passes.pop().close()

        model.register_forward_pre_hook(begin, with_kwargs=True)
        model.register_forward_hook(end, always_call=True)


def has_packed_rows(batch: Mapping[str, Any]) -> bool:
    """Return whether positions begin anew within a row; waits for the device that they are on."""
    found = holds_documents(batch)
    return found is not None and bool(found)
