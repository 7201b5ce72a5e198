"""Compute per-token statistics for preference and reinforcement losses, over a vocabulary sharded over ranks.

Each rank reduces its logits ``[N, V/t]`` to a few numbers per row, and one all-gather combines these numbers::

    log p(target)  = z_target - lse              lse  = logsumexp over ranks r of lse_r, the logsumexp of a rank's slice
    entropy        = lse - E[z]                  E[z] = sum over ranks of exp(lse_r - lse) E_r[z]
    log sum of p^2 = logsumexp(2 z) - 2 lse
    mean of z; whether the target is the token with the largest z (the first one if several are equal)

The backward pass needs no communication: ``d log p = onehot - p``, ``d entropy = -p (log p + entropy)``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .vocab_cross_entropy import Targets, VocabularySlice, compute_dtype, gathered


@dataclass
class TokenScores:
    """Hold statistics ``[b, s]`` of the logits at each position and of the token that the position predicts.

    As in the model's own loss, position ``i`` predicts the label at ``i + 1``. Entries are 0 at positions without a
    label to predict, such as the last position.

    Attributes:
        log_probs: log-probability of the predicted token; has gradients.
        entropy: entropy of the distribution, in nats; has gradients.
        log_sum_sq_probs: log of the sum of squared probabilities.
        mean_logits: mean logit over the vocabulary.
        is_top1: whether the predicted token is the most probable one; of equally probable tokens, only the first.
    """

    log_probs: Tensor
    entropy: Tensor
    log_sum_sq_probs: Tensor
    mean_logits: Tensor
    is_top1: Tensor

    def each(self) -> tuple[Tensor, ...]:
        """Return all five statistics, in the order of the attributes."""
        return self.log_probs, self.entropy, self.log_sum_sq_probs, self.mean_logits, self.is_top1


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: VocabularySlice
    ) -> tuple[Tensor, ...]:
        z = logits.to(compute_dtype(logits.dtype))
        at = Targets.of_slice(targets, vocabulary, z.shape[1])
        lse = z.logsumexp(-1, keepdim=True)
        hit = at.kept(z.gather(1, at.places))
        expected = ((z - lse).exp() * z).sum(-1, keepdim=True)
        places = torch.arange(
            vocabulary.start,
            vocabulary.start + z.shape[1],
            device=z.device,
        )
        earlier = z.masked_fill(places >= targets.unsqueeze(1), float("-inf")).amax(
            -1, keepdim=True
        )
        own = (
            lse,
            (2 * z).logsumexp(-1, keepdim=True),
            hit,
            expected,
            z.sum(-1, keepdim=True),
            z.amax(-1, keepdim=True),
        )
        terms = torch.cat((*own, earlier), 1)
        group = vocabulary.group
        every = terms.unsqueeze(0) if group is None else gathered(terms, group)  # [t, N, 7]
        lses, squares, hits, means, sums, largest, before = every.unbind(-1)
        lse = lses.logsumexp(0)
        target = hits.sum(0)
        entropy = lse - ((lses - lse).exp() * means).sum(0)
        top = (target >= largest.amax(0)) & (before.amax(0) < target)
        ctx.at = at
        ctx.save_for_backward(logits, lse, entropy)
        ctx.set_materialize_grads(False)
        others = squares.logsumexp(0) - 2 * lse, sums.sum(0) / vocabulary.size, top
        ctx.mark_non_differentiable(*others)
        return target - lse, entropy, *others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        logits, lse, entropy = ctx.saved_tensors
        by_log_prob, by_entropy = grads[:2]
        log_p = logits.to(lse.dtype) - lse.unsqueeze(1)
        p = log_p.exp()
        grad = torch.zeros_like(p)
        if by_entropy is not None:
            grad -= by_entropy.unsqueeze(1) * p * (log_p + entropy.unsqueeze(1))
        if by_log_prob is not None:
            column = by_log_prob.unsqueeze(1)
            grad -= column * p
            grad.scatter_add_(1, ctx.at.places, ctx.at.kept(column))
        return grad.to(logits.dtype), None, None


def token_scores(logits: Tensor, targets: Tensor, vocabulary: VocabularySlice) -> TokenScores:
    """Return log-probabilities and other per-token statistics ``[N]`` of ``targets [N]`` (global ids) under
    ``logits [N, V/t]``; equal on all ranks.

    ``logits`` is this rank's slice of the vocabulary, and the backward pass computes its gradient on each rank.
    """
    return TokenScores(*_Scores.apply(logits, targets, vocabulary))
