"""Prove that a model separates documents in one row: a tiny copy must compute the same for them one by one."""

from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.attention import answer, set_implementation
from ..._compat.transformers.computing import packing
from ...models.clone import VOCABULARY, layers_of_every_kind
from ...models.fields import lengths_of, with_lengths
from ...train.runtime.batches import BORDERS, with_borders
from .probe import apart, perturb, tiny_model_of, without_cache

_LENGTHS = (1, 6, 1, 4)
_NOWHERE = 64  # a length that nothing reaches
_TOLERANCE = 1e-4
"""Relative, in float32. What passes from one document to the next changes these logits by 1e-2 and more."""


def prove_documents(
    model: Any, kind: type, flash: bool, masked: bool, start: int, name: str, length: int
) -> tuple[str, bool]:
    """Return why documents in one row affect each other, in words; empty where they do not.

    Args:
        kind: the stock class of the model, which may be parallelized.
        flash: whether its attention is told of documents as flash kernels are.
        masked: whether documents are told apart by a mask, and not by positions.
        start: the position of a document's first token.
        name: a field of the config that shall say ``length``; empty for none.
    """
    lengths = dict.fromkeys(lengths_of(model.config), _NOWHERE) | ({name: length} if name else {})
    return _difference(kind, with_lengths(model.config, lengths), flash, masked, start), True


def _difference(kind: Any, config: Any, flash: bool, masked: bool, start: int) -> str:
    """Return how outputs differ between documents in one row and in separate rows; empty if they are equal."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        model = tiny_model_of(kind, config, torch.float32, layers=layers_of_every_kind(config))
        if model is None:
            return "no tiny copy of it could be made to prove the contrary"
        perturb(model, 0.1)
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
    relative = apart(found, expected)
    return "" if relative <= _TOLERANCE else f"logits of a tiny copy change by {relative:.1g} of the largest"


def _in_one_row(model: Any, ids: Tensor, flash: bool, masked: bool, start: int) -> Tensor:
    if masked:
        triangles = [torch.ones(length, length, dtype=torch.bool).tril() for length in _LENGTHS]
        return _logits(model, {"input_ids": ids, "attention_mask": torch.block_diag(*triangles).bool()[None, None]})
    positions = torch.cat([torch.arange(length) + start for length in _LENGTHS])[None]
    batch = {"input_ids": ids, "position_ids": positions}
    with packing(True, batch):
        return _logits(model, with_borders(batch, model) if flash else batch)


def _logits(model: Any, batch: Any) -> Tensor:
    logits: Tensor = model(**batch, **without_cache(model)).logits
    return logits


def _attend(host: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Attend as a flash kernel does, which separates documents by the lengths in ``cu_seq_lens_q`` alone."""
    starts = kwargs.pop(BORDERS[0], None)
    if starts is not None:
        documents = torch.bucketize(torch.arange(q.shape[2]), starts, right=True)
        mask = documents[:, None] == documents
        mask = (mask.tril() if getattr(module, "is_causal", True) else mask)[None, None]
    kwargs.pop("softcap", None)  # which sdpa does not take, and flash kernels do
    return host(module, q, k, v, mask, **kwargs)


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask, as transformers does for flash kernels."""
