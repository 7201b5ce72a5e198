"""Divergence of a student's rows of logits from a teacher's, over a vocabulary that is cut over ranks.

The generalized Jensen-Shannon divergence (Agarwal et al. 2024, "On-policy distillation of language models", section 2)
of the distributions ``p`` (student) and ``q`` (teacher), softmax of logits ``z`` over a temperature ``T``::

    beta = 0    D = KL(q | p), forward                        T dD/dz = p - q
    between     D = beta KL(q | m) + (1 - beta) KL(p | m)     T dD/dz = (1 - beta) p (log p - log m - KL(p | m))
                    with m = (1 - beta) p + beta q
    beta = 1    D = KL(p | q), reverse                        T dD/dz = p (log p - log q - KL(p | q))

Ranks exchange the log-sum-exp of both slices of a row, then its slices' sums: two all-gathers of a few numbers per row.
The gradient needs no communication, as in :mod:`hfscale.distributed.ops.vocab_cross_entropy`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .vocab_cross_entropy import VocabularySlice, compute_dtype, gathered


@dataclass(frozen=True)
class TeacherRows:
    """Hold the teacher's rows, its head over this rank's slice of the vocabulary, and the divergence from it."""

    hidden: Tensor  # [N, h], equal on all tensor ranks
    weight: Tensor  # [V/t, h]
    bias: Tensor | None  # [V/t]
    finish: Callable[[Tensor], Tensor] | None  # pointwise operations of the teacher on its logits
    beta: float
    temperature: float
    entropy: Tensor | None = None  # [N], where the entropies of the student's rows are written

    def terms(self, logits: Tensor, rows: Tensor, vocabulary: VocabularySlice) -> "DivergenceTerms":
        """Return the divergences of the student's ``logits [n, V/t]`` of ``rows [n]``."""
        with torch.autocast(logits.device.type, enabled=False):
            own = F.linear(self.hidden.index_select(0, rows), self.weight, self.bias)
            own = own if self.finish is None else self.finish(own)
        made = DivergenceTerms(logits, own, vocabulary, self.beta, self.temperature)
        if self.entropy is not None:
            self.entropy.index_copy_(0, rows, made.entropy.to(self.entropy.dtype))
        return made


class DivergenceTerms:
    """Divergences of rows, and, once, their gradients by the student's ``logits [n, V/t]``."""

    def __init__(
        self, logits: Tensor, teacher: Tensor, vocabulary: VocabularySlice, beta: float, temperature: float
    ) -> None:
        self._beta, self._temperature = beta, temperature
        both = [each.to(compute_dtype(logits.dtype)) / temperature for each in (logits, teacher)]
        lse = torch.stack([each.logsumexp(-1, keepdim=True) for each in both])
        if vocabulary.group is not None:
            lse = gathered(lse, vocabulary.group).logsumexp(0)
        self._log_p, self._log_q = (each.sub_(whole) for each, whole in zip(both, lse, strict=True))
        if beta in (0, 1):
            log_m = self._log_q if beta else self._log_p
        else:
            log_m = torch.logaddexp(self._log_p + math.log1p(-beta), self._log_q + math.log(beta))
        self._gap = _expected(self._log_p, log_m)
        terms = self._gap, _expected(self._log_q, log_m), _expected(self._log_p, torch.zeros_like(log_m))
        sums = torch.stack([each.sum(-1, keepdim=True) for each in terms])
        if vocabulary.group is not None:
            sums = gathered(sums, vocabulary.group).sum(0)
        self._from_student, self._from_teacher, minus_entropy = sums
        self.entropy = -minus_entropy.squeeze(1)  # [n], of the student, in nats

    def losses(self) -> Tensor:
        """Return the divergences ``[n, 1]``, equal on all ranks."""
        return (self._beta or 1) * self._from_teacher + (1 - self._beta or 1) * self._from_student

    def gradient(self, logits: Tensor, scale: Tensor, reuse: bool = False) -> Tensor:
        """Return ``scale`` (``[]`` or ``[n, 1]``) ``* d losses / d logits``; with ``reuse``, in ``logits``."""
        p = self._log_p.exp_()
        if self._beta == 0:
            p.sub_(self._log_q.exp_())
        else:
            p.mul_(-self._from_student).add_(self._gap).mul_(1 - self._beta or 1)
        p.mul_(scale / self._temperature)
        return logits.copy_(p) if reuse else p.to(logits.dtype)


def _expected(log_p: Tensor, log_m: Tensor) -> Tensor:
    """Return ``p (log p - log m)``, entry by entry; 0 for an impossible token, whose logit is ``-inf``."""
    return (log_p.exp() * (log_p - log_m)).masked_fill_(log_p == -torch.inf, 0)
