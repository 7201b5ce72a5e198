"""Prove whether a model's loss is that of causal language models, or a mean over rows or over labels.

The name of a loss proves nothing: some classes use the causal loss under another name, and some classes use its name
but shift labels themselves, or add to the loss. Also prove that a model separates the documents of a row: a tiny clone
must compute the same for the row as for each document alone.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.classes import has_causal_loss, loss_replaced, takes_argument
from ..._compat.transformers.computing import answer
from ..._compat.transformers.experts import use_eager_experts
from ..._compat.transformers.implementations import set_implementation
from ..._compat.transformers.packed_rows import packing
from ...distributed.ops.segments import keep_states_apart
from ...models.clone import VOCABULARY, layers_of_every_kind
from ...models.fields import lengths_of, text_config, with_lengths
from ...models.precision import keep_float64
from ...plan.drafting.boundary_modules import PROBED
from ...plan.feature_plans import OwnLossPlan
from ...train.packed_rows.facts import LENGTHS, with_document_lengths
from ...train.packed_rows.guard import PackedRows
from .probe import (
    Probe,
    apart,
    names_no_size,
    perturb,
    probed,
    skipped_experts,
    tiny_model_of,
    without_cache,
)

_ROWS = (3, 2)
_TOKENS = 6
_IGNORED = -100
_LARGEST_ID = 60
_TOLERANCE = 1e-9
_COUNTS = {"rows": len, "labels": lambda labels: (labels != _IGNORED).sum()}


_LENGTHS = (1, 6, 1, 4)  # lengths of documents in one row
_NOWHERE = 64  # a number of tokens that is larger than the length of the row
_APART = 1e-4  # relative, in float32; leaks between documents change logits by 1e-2 or more


def prove_loss(model: Any) -> tuple[str | None, bool]:
    """Return why the loss is not the shifted causal loss, called once on all logits and the given labels; ``None`` if
    it is that loss.
    """
    if not has_causal_loss(model):
        why: str | None = f"its loss_type is {getattr(model, 'loss_type', None)!r}"
    else:
        probe = probed(_LossProbe, model)
        why = f"it cannot be traced ({probe.failure})" if probe.failure else probe.difference
    return why, names_no_size(why or "")


class _LossProbe(Probe):
    """Run a model on two tokens with labels, with a recording function in place of its loss function."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # How the model's loss differs, in words; ``None`` if it does not.
        self.difference: str | None = None
        self._calls = 0
        device = next(model.parameters()).device
        self._labels = torch.full(PROBED, 4, dtype=torch.long, device=device)
        self._answer = torch.zeros((), device=device)
        self._after(model, self._compare)
        with loss_replaced(model, self._loss), skipped_experts(model.modules()):
            self._run(labels=self._labels)

    def _loss(
        self,
        logits: Any = None,
        labels: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        self._calls += 1
        if not isinstance(logits, Tensor) or tuple(logits.shape[:2]) != PROBED:
            self.difference = "its loss is not of the logits of all tokens"
        elif (
            not isinstance(labels, Tensor)
            or labels.shape != self._labels.shape
            or not self._is_given(labels)
        ):
            self.difference = "it changes labels before its loss"
        elif kwargs.get("shift_labels") is not None:
            self.difference = "it shifts labels itself"
        return self._answer

    def _is_given(self, labels: Tensor) -> bool:
        return labels is self._labels or (
            not labels.is_meta and bool((labels == self._labels).all())
        )

    def _compare(self, _: Any, args: Any, output: Any) -> None:
        loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
        if self._calls != 1:
            self.difference = f"it calls its loss function {self._calls} times"
        elif loss is not self._answer:
            self.difference = self.difference or "it computes on its loss"


def prove_own_loss(model: Any) -> tuple[dict[str, Any] | None, bool]:
    """Return the fields of a :class:`hfscale.plan.feature_plans.OwnLossPlan`; ``None`` if the loss depends on how a
    step's batch is divided into microbatches.

    The loss does not depend on that if a tiny clone's loss of two batches together is the mean of both losses, weighted
    by rows (text classification) or by labels that are not ignored (tokens).
    """
    config = model.config
    model = tiny_model_of(type(model), config, torch.float64)
    if model is None:
        return None, True
    model.eval()
    use_eager_experts(model)  # transformers' grouped products lack float64
    text = text_config(model.config)
    for part in (model.config, text):
        # Decoders find the last token of each row by the padding token; without it they accept only one row at a time.
        part.pad_token_id = 0 if getattr(part, "pad_token_id", None) is None else part.pad_token_id
    end = getattr(text, "eos_token_id", None)  # encoder-decoders classify texts at this token
    end = (
        end if isinstance(end, int) and getattr(model.config, "is_encoder_decoder", False) else None
    )
    vocabulary = getattr(text, "vocab_size", _LARGEST_ID)  # some hash characters
    for first, second in _pairs(
        int(getattr(config, "num_labels", 2) or 2),
        int(vocabulary),
        end,
    ):
        # Stock code may raise anything for labels of a wrong kind.
        with (
            suppress(Exception),
            torch.no_grad(),
            keep_float64(),
        ):
            together = {
                name: torch.cat(
                    [
                        first[name],
                        second[name],
                    ]
                )
                for name in first
            }
            losses = [float(model(**batch).loss) for batch in (first, second, together)]
            over = next(
                (over for over, count in _COUNTS.items() if _is_mean(count, losses, first, second)),
                None,
            )
            if over is not None:
                return asdict(OwnLossPlan(over, _divides(model, first, losses[0]))), True
            # Only ignored rows justify another try: without them, other labels give the same result.
            if first["labels"].ndim > 1 or not (first["labels"] == _IGNORED).any():
                return None, True
    return None, True


def prove_token_loss(model: Any) -> tuple[bool, bool]:
    """Return whether the model's loss is the mean cross entropy of its logits and labels ``[b, s]`` at the same
    positions, so that the loss over some tokens is the mean over those tokens; tried on a tiny clone.
    """
    model = tiny_model_of(type(model), model.config, torch.float64)
    ids = torch.randint(
        3, _LARGEST_ID, (max(_ROWS), _TOKENS), generator=torch.Generator().manual_seed(3)
    )
    labels = (ids % 2).masked_fill(ids % 3 == 0, _IGNORED)
    # There may be no clone, and stock code may raise anything for such labels.
    with (
        suppress(Exception),
        torch.no_grad(),
        keep_float64(),
    ):
        use_eager_experts(model)
        # Some models leave out labels on padding, but other models count them.
        padded = takes_argument(model, "attention_mask")
        mask = (
            {"attention_mask": (torch.arange(_TOKENS) < _TOKENS - 2).long().expand_as(ids)}
            if padded
            else {}
        )
        output = model.eval()(input_ids=ids, labels=labels, **mask)
        wanted = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return abs(float(output.loss - wanted)) <= _TOLERANCE, True
    return False, True


def _pairs(
    classes: int, vocabulary: int, end: int | None
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Yield pairs of batches on which to compare losses, with labels per row or per token, some of them ignored; every
    row ends with the token ``end``.
    """
    generator = torch.Generator().manual_seed(3)
    ids = [
        torch.randint(3, min(_LARGEST_ID, vocabulary), (rows, _TOKENS), generator=generator)
        for rows in _ROWS
    ]
    if end is not None:
        ids = [each.masked_fill(each == end, 3 if end != 3 else 4) for each in ids]
        for each in ids:
            each[:, -1] = end
    kinds = torch.randint(
        0,
        max(classes, 1),
        (sum(_ROWS), _TOKENS),
        generator=generator,
    )
    tokens = kinds.masked_fill(torch.rand(kinds.shape, generator=generator) < 0.4, _IGNORED)
    rows = (
        kinds[:, 0]
        if classes > 1
        else kinds[:, 0] + torch.rand(sum(_ROWS), generator=generator).double()
    )
    some = rows.index_fill(0, torch.tensor([1]), _IGNORED)
    for labels in (some, rows, tokens) if classes > 1 else (rows, tokens):
        first, second = (
            {"input_ids": each, "attention_mask": torch.ones_like(each), "labels": own}
            for each, own in zip(ids, labels.split(list(_ROWS)), strict=True)
        )
        yield first, second


def _divides(model: Any, batch: dict[str, Tensor], mean: float) -> bool:
    """Return whether the model divides its loss by the argument ``num_items_in_batch``; ``mean`` is the loss without
    it.
    """
    if not takes_argument(model, "num_items_in_batch"):
        return False
    return abs(float(model(**batch, num_items_in_batch=1000).loss) - mean) > _TOLERANCE


def _is_mean(
    count: Any,
    losses: list[float],
    first: dict[str, Tensor],
    second: dict[str, Tensor],
) -> bool:
    one, other = (int(count(batch["labels"])) for batch in (first, second))
    weighted = (losses[0] * one + losses[1] * other) / (one + other)
    return abs(weighted - losses[2]) <= _TOLERANCE * abs(losses[2])


def prove_documents(
    model: Any,
    kind: type,
    flash: bool,
    masked: bool,
    start: int,
    name: str,
    length: int,
) -> tuple[str, bool]:
    """Return the reason why documents in one row affect each other; empty if they do not. The model, of the stock class
    ``kind``, may be parallelized. Documents are marked for attention by their lengths (``flash``, like flash kernels),
    by a mask (``masked``), or otherwise by positions, which begin at ``start``. The config's field ``name``, if any, is
    set to ``length``.
    """
    lengths = dict.fromkeys(lengths_of(model.config), _NOWHERE) | ({name: length} if name else {})
    config = with_lengths(model.config, lengths)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        model = tiny_model_of(kind, config, torch.float32, layers=layers_of_every_kind(config))
        if model is None:
            return "no tiny copy of it could be made to prove the contrary", True
        perturb(model, 0.1)
        if flash:  # no mask, because transformers makes none for flash kernels
            like_flash = answer("documents_", "sdpa", _attend, lambda *_, **__: None)
            set_implementation(model.config.get_text_config(), like_flash)
        keep_states_apart(model, PackedRows().segments)
        ids = torch.randint(3, min(VOCABULARY, 60), (1, sum(_LENGTHS)))
        try:
            parts = [
                _logits(model.eval(), {"input_ids": part}) for part in ids.split(_LENGTHS, dim=1)
            ]
            packed = _in_one_row(model, ids, flash, masked, start)
        except Exception as error:  # of any type: stock code refuses arguments
            return f"{type(error).__name__}: {error}".split("\n")[0][:200], True
    expected = torch.cat(parts, dim=1)
    if packed.shape != expected.shape:
        return "its logits are not one row per token", True
    relative = apart(packed, expected)
    return (
        ""
        if relative <= _APART
        else f"logits of a tiny copy change by {relative:.1g} of the largest",
        True,
    )


def _in_one_row(
    model: Any,
    ids: Tensor,
    flash: bool,
    masked: bool,
    start: int,
) -> Tensor:
    if masked:
        triangles = [torch.ones(length, length, dtype=torch.bool).tril() for length in _LENGTHS]
        return _logits(
            model,
            {"input_ids": ids, "attention_mask": torch.block_diag(*triangles).bool()[None, None]},
        )
    positions = torch.cat([torch.arange(length) + start for length in _LENGTHS])[None]
    batch = {"input_ids": ids, "position_ids": positions}
    with packing(True, batch):
        return _logits(model, with_document_lengths(batch, model) if flash else batch)


def _logits(model: Any, batch: Any) -> Tensor:
    return model(**batch, **without_cache(model)).logits


def _attend(
    host: Any,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    **kwargs: Any,
) -> Any:
    """Attend like a flash kernel, which separates documents only by the lengths in ``cu_seq_lens_q``."""
    starts = kwargs.pop(LENGTHS[0], None)
    if starts is not None:
        documents = torch.bucketize(torch.arange(q.shape[2]), starts, right=True)
        mask = documents[:, None] == documents
        mask = (mask.tril() if getattr(module, "is_causal", True) else mask)[None, None]
    kwargs.pop("softcap", None)  # an argument of flash kernels that sdpa lacks
    return host(module, q, k, v, mask, **kwargs)
