"""Score every token of a forward pass, by chunks of rows, in place of the loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...distributed.ops.head_cross_entropy import rows_per_chunk
from ...distributed.ops.overlap import as_it_is
from ...distributed.ops.token_scores import TokenScores, token_scores
from ...distributed.ops.vocab_cross_entropy import VocabularySlice, compute_dtype
from ...errors import ConfigError
from .lazy_logits import LazyLogits, Pointwise

_IGNORED = -100


class Scoring:
    """In a forward pass with labels, compute statistics of each token instead of the mean loss: the log-probability of
    its label, the entropy and others (:class:`TokenScores`), one chunk of rows at a time.

    With ``read``, no statistics are computed. Instead ``read`` is called with the lazy logits, whose ``hidden`` is the
    head's input, and its result is kept in ``made``.

    ::

        hidden [b, s, h] --> rows with a target --> chunk --> head, /temperature --> token_scores --> [n] each
                                                      ^------ recomputed in the backward pass ------|
    """

    def __init__(
        self, temperature: float, read: Callable[[Any, VocabularySlice], Any] | None
    ) -> None:
        self.temperature = temperature
        self._read = read
        # the result of ``read``, which is called while the head's weights are gathered
        self.made: Any = None
        self.scores: TokenScores | None = None  # the scores ``[b, s]`` of the last pass

    def take(self, logits: Tensor, targets: Tensor, vocabulary: VocabularySlice) -> Tensor:
        """Compute and keep each token's statistics (log-probability of its label and others) from ``logits [b, s,
        V/t]``, lazy or real; return the sum of the cross entropies.

        The sum is connected to the graph on every rank, even if no position has a target. If the object was made with
        ``read``, only call ``read``, and return 0.
        """
        temperature = self.temperature
        if self._read is not None:
            if not isinstance(logits, LazyLogits) or logits.value is not None:
                raise ConfigError(
                    "the teacher's class changes its logits by an operation that is not pointwise (as a scale or a "
                    "softcap would be), so a copy of its head does not give its logits, as distillation needs: use a "
                    "teacher of another class"
                )
            self.made = self._read(logits, vocabulary)
            return logits.hidden.new_zeros((), dtype=compute_dtype(logits.dtype))
        project: Pointwise = as_it_is
        if isinstance(logits, LazyLogits) and logits.value is None:
            rows = logits.hidden.reshape(-1, logits.hidden.shape[-1])
            project = logits.logits
        else:
            real = logits.materialize() if isinstance(logits, LazyLogits) else logits
            rows = real.reshape(-1, real.shape[-1])
        valid = (targets != _IGNORED).nonzero().squeeze(1)
        compute = compute_dtype(logits.dtype)
        shape = logits.shape[:-1]

        def chunk(given: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
            return token_scores(project(given).to(compute) / temperature, wanted, vocabulary).each()

        made = []
        for chosen in (
            valid.split(rows_per_chunk(len(valid), vocabulary.widest, rows.device))
            if len(valid)
            else ()
        ):
            given = rows.index_select(0, chosen), targets.index_select(0, chosen)
            kept = (
                checkpoint(chunk, *given, use_reentrant=False)
                if torch.is_grad_enabled()
                else chunk(*given)
            )
            made.append(kept)
        # Nothing to score, but every rank must get gradients (of zeros), also for the head.
        if not made:
            empty = (project(rows[:1]).sum() * 0).to(compute).expand(len(targets))
            whole = [
                empty,
                empty,
                *(empty.detach(),) * 2,
                empty.detach().bool(),
            ]
        else:
            joined = [torch.cat(parts) for parts in zip(*made, strict=True)]
            whole = [each.new_zeros(len(targets)).index_copy(0, valid, each) for each in joined]
        self.scores = TokenScores(*(each.view(shape) for each in whole))
        return -whole[0].sum()
