"""Compute the divergence of a student's logits from a teacher's, row by row, over a vocabulary sharded over ranks.

The generalized Jensen-Shannon divergence (Agarwal et al. 2024, "On-policy distillation of language models", section 2)
of the distributions ``p`` (student) and ``q`` (teacher), softmax of logits ``z`` over a temperature ``T``::

    beta = 0    D = KL(q | p), forward                        T dD/dz = p - q
    between     D = beta KL(q | m) + (1 - beta) KL(p | m)     T dD/dz = (1 - beta) p (log p - log m - KL(p | m))
                    with m = (1 - beta) p + beta q
    beta = 1    D = KL(p | q), reverse                        T dD/dz = p (log p - log q - KL(p | q))

For a stored teacher (:class:`StoredRows`) each row has the ``k`` most probable tokens, the set ``K``, with their
probabilities, and the total probability ``r`` of all other tokens. The divergence is then computed over ``k + 1``
events: each token of ``K``, and "any other token", which has the probability ``p_rest = sum of p outside of K`` for the
student. Value and gradient equal those of the formulas above with the teacher ::

    q_i as stored for i in K        q_j = r p_j / p_rest for other tokens, in proportion to the student's p_j

This divergence is at most the divergence over all tokens (by the log sum inequality), and equal to it at ``k = V``.

Ranks communicate in two all-gathers of a few numbers per row: first the log-sum-exps of their slices of student and
teacher, then the sums over their slices. As in :mod:`hfscale.distributed.ops.vocab_cross_entropy`, the gradient needs
no communication.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .vocab_cross_entropy import VocabularySlice, compute_dtype, gathered


@dataclass(frozen=True, kw_only=True)
class TaughtRows:
    """Hold what is known of a teacher's distribution for each row (token position), and compute a student's divergence
    from it. Rows are equal on all tensor ranks; the vocabulary is sharded over them.
    """

    beta: float
    temperature: float
    entropy: Tensor | None = None  # [N], an output: receives the entropies of the student's rows

    def log_probs(
        self, logits: Tensor, rows: Tensor, vocabulary: VocabularySlice
    ) -> tuple[Tensor, Tensor]:
        """Return two tensors of log-probabilities ``[n, V/t]``, over this rank's slice of the vocabulary: the
        student's, from its ``logits``, and the teacher's, for the rows with the indices ``rows``.
        """
        raise NotImplementedError

    def terms(self, logits: Tensor, rows: Tensor, vocabulary: VocabularySlice) -> "DivergenceTerms":
        """Return the divergences of a student from the teacher: row ``i`` of the student's ``logits [n, V/t]`` is
        compared with the teacher's row ``rows[i]``.
        """
        log_p, log_q = self.log_probs(logits, rows, vocabulary)
        made = DivergenceTerms(log_p, log_q, vocabulary, self.beta, self.temperature)
        if self.entropy is not None:
            self.entropy.index_copy_(0, rows, made.entropy.to(self.entropy.dtype))
        return made


@dataclass(frozen=True, kw_only=True)
class TeacherRows(TaughtRows):
    """Hold a teacher as its final hidden states, one row per token position, and this rank's slice of its head."""

    hidden: Tensor  # [N, h]
    weight: Tensor  # [V/t, h]
    bias: Tensor | None  # [V/t]
    finish: Callable[[Tensor], Tensor] | None  # pointwise operations of the teacher on its logits

    def log_probs(
        self, logits: Tensor, rows: Tensor, vocabulary: VocabularySlice
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the student and of the teacher; see :meth:`TaughtRows.log_probs`."""
        with torch.autocast(logits.device.type, enabled=False):
            own = F.linear(self.hidden.index_select(0, rows), self.weight, self.bias)
            own = own if self.finish is None else self.finish(own)
        both = [each.to(compute_dtype(logits.dtype)) / self.temperature for each in (logits, own)]
        lse = log_sum_exps(both, vocabulary)
        return both[0].sub_(lse[0]), both[1].sub_(lse[1])


@dataclass(frozen=True, kw_only=True)
class StoredRows(TaughtRows):
    """Hold a teacher as the stored log-probabilities of its ``k`` most probable tokens for each row (token
    position).
    """

    stored: Tensor  # [N, k] log-probabilities of the tokens
    tokens: Tensor  # [N, k] global ids of the tokens
    rest: Tensor  # [N] log of the total probability of all other tokens

    def log_probs(
        self, logits: Tensor, rows: Tensor, vocabulary: VocabularySlice
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the student and of the teacher; see :meth:`TaughtRows.log_probs`.

        For tokens that are not stored, the teacher's probabilities are proportional to the student's.
        """
        z = logits.to(compute_dtype(logits.dtype)) / self.temperature
        stored, tokens, rest = (
            each.index_select(0, rows) for each in (self.stored, self.tokens, self.rest)
        )
        columns = _columns(tokens, z, vocabulary)
        lse, others = log_sum_exps([z, _with_columns(z, columns, -torch.inf)], vocabulary)
        log_p = z.sub_(lse)
        spread = log_p + (rest.unsqueeze(1).to(z.dtype) - (others - lse))
        spread.masked_fill_(log_p == -torch.inf, -torch.inf)
        return log_p, _with_columns(spread, columns, stored.to(z.dtype))


def top_tokens(
    logits: Tensor, k: int, temperature: float, vocabulary: VocabularySlice
) -> tuple[Tensor, ...]:
    """Return the ``k`` most probable tokens of each row, given ``logits [n, V/t]`` over this rank's slice of the
    vocabulary; the result is equal on all ``t`` tensor ranks.

    Returns:
        The tokens' log-probabilities ``[n, k]``, their global ids ``[n, k]``, and the log of the total probability of
        all other tokens ``[n]``.
    """
    z = logits.to(compute_dtype(logits.dtype)) / temperature
    most = min(k, vocabulary.widest)
    padded = F.pad(
        z,
        (0, max(most - z.shape[1], 0)),
        value=-torch.inf,
    )
    values, places = padded.topk(most)
    tokens = places + vocabulary.start
    if vocabulary.group is not None:
        values, tokens = (
            gathered(each, vocabulary.group).transpose(0, 1).flatten(1) for each in (values, tokens)
        )
    values, chosen = values.topk(k)
    tokens = tokens.gather(1, chosen)
    lse, others = log_sum_exps(
        [z, _with_columns(z, _columns(tokens, z, vocabulary), -torch.inf)], vocabulary
    )
    return values - lse, tokens, (others - lse).squeeze(1)


def log_sum_exps(rows: Sequence[Tensor], vocabulary: VocabularySlice) -> Tensor:
    """Return the log-sum-exp over the full vocabulary of each row of several tensors of logits, as ``[len(rows), n,
    1]``; each tensor is ``[n, V/t]``, over this rank's slice of the vocabulary.
    """
    lse = torch.stack([row.logsumexp(-1, keepdim=True) for row in rows])
    return lse if vocabulary.group is None else gathered(lse, vocabulary.group).logsumexp(0)


def _columns(tokens: Tensor, z: Tensor, vocabulary: VocabularySlice) -> Tensor:
    """Return the columns that ``tokens`` (global ids) have in this rank's slice of the logits ``z``; a token outside
    the slice gets the column after the last one.
    """
    places = tokens - vocabulary.start
    width = z.shape[1]
    return torch.where((places >= 0) & (places < width), places, width)


def _with_columns(z: Tensor, columns: Tensor, values: Tensor | float) -> Tensor:
    """Return a copy of ``z`` in which each row has ``values`` in its ``columns``; values for a column after the last
    one are dropped.
    """
    # values of tokens outside of the slice go to an extra column, which is removed
    wide = F.pad(z, (0, 1))
    return wide.scatter_(1, columns, values)[:, :-1]  # type: ignore[arg-type]  # a number or a tensor


class DivergenceTerms:
    """Compute the divergence of each row, and its gradient by the student's ``logits [n, V/t]`` over this rank's slice
    of the vocabulary.

    :meth:`gradient` may be called once, because it overwrites the log-probabilities.
    """

    def __init__(
        self,
        log_p: Tensor,
        log_q: Tensor,
        vocabulary: VocabularySlice,
        beta: float,
        temperature: float,
    ) -> None:
        self._beta = beta
        self._temperature = temperature
        self._log_p = log_p
        self._log_q = log_q
        if beta in (0, 1):
            log_m = self._log_q if beta else self._log_p
        else:
            log_m = torch.logaddexp(
                self._log_p + math.log1p(-beta),
                self._log_q + math.log(beta),
            )
        self._gap = _expected(self._log_p, log_m)
        terms = (
            self._gap,
            _expected(self._log_q, log_m),
            _expected(self._log_p, torch.zeros_like(log_m)),
        )
        sums = torch.stack([term.sum(-1, keepdim=True) for term in terms])
        if vocabulary.group is not None:
            sums = gathered(sums, vocabulary.group).sum(0)
        self._from_student, self._from_teacher, minus_entropy = sums
        self.entropy = -minus_entropy.squeeze(1)  # [n], entropy of the student, in nats

    def losses(self) -> Tensor:
        """Return the divergence of each row, ``[n, 1]``, equal on all tensor ranks."""
        return (self._beta or 1) * self._from_teacher + (1 - self._beta or 1) * self._from_student

    def gradient(self, logits: Tensor, scale: Tensor, reuse: bool = False) -> Tensor:
        """Return ``scale`` times the gradient of each row's divergence by the student's ``logits``; ``scale`` is ``[]``
        or ``[n, 1]``.

        With ``reuse``, the result is written into ``logits``.
        """
        p = self._log_p.exp_()
        if self._beta == 0:
            p.sub_(self._log_q.exp_())
        else:
            p.mul_(-self._from_student).add_(self._gap).mul_(1 - self._beta or 1)
        p.mul_(scale / self._temperature)
        return logits.copy_(p) if reuse else p.to(logits.dtype)


def _expected(log_p: Tensor, log_m: Tensor) -> Tensor:
    """Return ``p (log p - log m)`` elementwise, given ``log p`` and ``log m``; 0 for tokens with probability ``p = 0``
    (a logit of ``-inf``).
    """
    return (log_p.exp() * (log_p - log_m)).masked_fill_(log_p == -torch.inf, 0)
