"""Compute scores (log-probability, entropy) of every token instead of the loss, by chunks of labelled rows.

::

    hidden [b, s, h] --> rows with a target --> chunk --> head, /temperature --> token_scores --> [n] each
                                                  ^------ made again in the backward pass ------|
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...distributed.ops.head_cross_entropy import rows_per_chunk
from ...distributed.ops.token_scores import TokenScores, token_scores
from ...distributed.ops.vocab_cross_entropy import VocabularySlice, compute_dtype
from ...errors import ConfigError
from .lazy_logits import LazyLogits

_IGNORED = -100


class Scoring:
    """Compute per-token scores in a forward pass with labels, instead of the mean loss; without a temperature, keep
    the lazy logits only, of which ``logits.hidden`` is what the head reads.
    """

    logits: Tensor

    def __init__(self, temperature: float | None = 1.0) -> None:
        self.temperature = temperature
        self.scores: TokenScores | None = None  # of the last pass, ``[b, s]``

    def take(self, logits: Tensor, targets: Tensor, vocabulary: VocabularySlice) -> Tensor:
        """Keep the scores of ``logits [b, s, V/t]``, lazy or real; return the sum of the cross entropies, which is a
        part of every rank's graph, also where nothing has a target; 0 without a temperature.
        """
        temperature = self.temperature
        if temperature is None:
            if not isinstance(logits, LazyLogits) or logits.value is not None:
                raise ConfigError("a teacher's class must scale or cap its head's logits one by one: use another one")
            self.logits = logits
            return logits.hidden.new_zeros((), dtype=compute_dtype(logits.dtype))
        rows, project = self._projection(logits)
        valid = (targets != _IGNORED).nonzero().squeeze(1)
        compute, shape = compute_dtype(logits.dtype), logits.shape[:-1]

        def chunk(given: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
            return token_scores(project(given).to(compute) / temperature, wanted, vocabulary).each()

        made = []
        for chosen in valid.split(rows_per_chunk(len(valid), vocabulary.widest, rows.device)) if len(valid) else ():
            given = rows.index_select(0, chosen), targets.index_select(0, chosen)
            kept = checkpoint(chunk, *given, use_reentrant=False) if torch.is_grad_enabled() else chunk(*given)
            made.append(kept)
        if not made:  # nothing to score; but gradients, of zeros, are to come to every rank, of the head too
            empty = (project(rows[:1]).sum() * 0).to(compute).expand(len(targets))
            whole = [empty, empty, *(empty.detach(),) * 2, empty.detach().bool()]
        else:
            found = [torch.cat(parts) for parts in zip(*made, strict=True)]
            whole = [each.new_zeros(len(targets)).index_copy(0, valid, each) for each in found]
        self.scores = TokenScores(*(each.view(shape) for each in whole))
        return -whole[0].sum()

    @staticmethod
    def _projection(logits: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return rows, and a function from some rows to logits ``[n, V/t]``."""
        if isinstance(logits, LazyLogits) and logits.value is None:
            return logits.hidden.reshape(-1, logits.hidden.shape[-1]), logits.logits
        real = logits.materialize() if isinstance(logits, LazyLogits) else logits
        return real.reshape(-1, real.shape[-1]), lambda rows: rows
