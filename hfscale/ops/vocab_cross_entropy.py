"""Cross entropy over a vocabulary that is cut over ranks; full logits never exist.

Each rank holds ``logits [N, V/t]`` for its slice of the vocabulary and reduces them to two numbers per token: the
log-sum-exp of its slice and the logit of the target, where the target lies in its slice. One all-gather of those
``2 N`` numbers gives the loss everywhere. (Megatron-LM, Shoeybi et al. 2019, section 3, reduces twice: a maximum, then
the sums.) Label smoothing (Szegedy et al. 2016) takes a third number, the sum of the slice. The backward pass needs no
communication.

::

    rank 0: logits[:, :V/2] -> lse0, target0 --+ all-gather   lse = logaddexp(lse0, lse1)
    rank 1: logits[:, V/2:] -> lse1, target1 --+              loss = sum(lse - (target0 + target1))

Rows are worked in blocks, in float32 (float64 for float64 logits), so that no second ``[N, V/t]`` buffer in that type
is needed. :class:`RowTerms` is that arithmetic, for this operator and for the one that runs the head itself
(:mod:`hfscale.ops.head_cross_entropy`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK_ELEMENTS = 1 << 20  # per block of rows: small enough to stay in cache on a CPU, large enough to fill a GPU
_BLOCK_ELEMENTS_GPU = 1 << 26


@dataclass(frozen=True)
class VocabularySlice:
    """Which part of the vocabulary this rank holds.

    Attributes:
        start: the first token id of this rank's slice.
        size: token ids in the whole vocabulary.
        widest: token ids in the longest slice, equal on all ranks.
        group: the tensor ranks; ``None`` for one rank, which holds the whole vocabulary.
        smoothing: share of the target's probability that is spread evenly over the whole vocabulary.
    """

    start: int
    size: int
    widest: int
    group: dist.ProcessGroup | None = None
    smoothing: float = 0.0


class RowTerms:
    """Losses of some rows, and their gradients by the logits.

    Args:
        logits: ``[n, V/t]``, this rank's slice.
        targets: ``[n]`` token ids, equal on all ranks; a target outside of the vocabulary hits no logit.
    """

    def __init__(self, logits: Tensor, targets: Tensor, vocabulary: VocabularySlice) -> None:
        self.vocabulary = vocabulary
        local = targets - vocabulary.start
        self.owned = (local >= 0) & (local < logits.shape[1])
        self.local = torch.where(self.owned, local, 0)
        compute = compute_dtype(logits.dtype)
        lse = torch.empty(logits.shape[0], dtype=compute, device=logits.device)
        for rows in _blocks(logits):
            torch.logsumexp(logits[rows].to(compute), -1, out=lse[rows])
        hit = logits.gather(1, self.local[:, None]).squeeze(1).to(compute)
        terms = [lse, torch.where(self.owned, hit, 0)]
        if vocabulary.smoothing:
            terms.append(logits.sum(-1, dtype=compute))
        self.lse, *self._sums = _over_ranks(torch.stack(terms), vocabulary.group)

    def losses(self) -> Tensor:
        """``[n]``, equal on all ranks."""
        eps = self.vocabulary.smoothing
        if not eps:
            return self.lse - self._sums[0]
        return self.lse - (1 - eps) * self._sums[0] - eps / self.vocabulary.size * self._sums[1]

    def gradient(self, logits: Tensor, scale: Tensor, out: Tensor) -> None:
        """Write ``scale [n] * d losses / d logits`` into ``out``, which may be ``logits`` itself."""
        eps, scale = self.vocabulary.smoothing, scale[:, None]
        for rows in _blocks(logits):
            # d loss / d logits = softmax - one_hot(target); the buffer is reused only where it has the right type
            block = logits[rows].to(self.lse.dtype)
            probabilities = torch.sub(block, self.lse[rows, None], out=out[rows] if out.dtype == block.dtype else None)
            probabilities.exp_().mul_(scale[rows])
            if eps:
                probabilities.sub_(eps / self.vocabulary.size * scale[rows])
            hit = (eps - 1) * (self.owned[rows, None] * scale[rows]).to(block.dtype)
            probabilities.scatter_add_(1, self.local[rows, None], hit)
            if out.dtype != block.dtype:
                out[rows] = probabilities


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over the vocabulary are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _over_ranks(terms: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """``[k, n]``: the log-sum-exp of this rank's slice, then sums over it -> the same of the whole vocabulary."""
    if group is None:
        return terms
    pieces = [torch.empty_like(terms) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, terms, group=group)
    everyone = torch.stack(pieces)  # [t, k, n]
    return torch.cat((everyone[:, :1].logsumexp(0), everyone[:, 1:].sum(0)))


def _blocks(logits: Tensor) -> list[slice]:
    budget = _BLOCK_ELEMENTS if logits.device.type == "cpu" else _BLOCK_ELEMENTS_GPU
    step = max(1, budget // max(1, logits.shape[1]))
    return [slice(i, i + step) for i in range(0, logits.shape[0], step)]


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [N, V/t]
        targets: Tensor,  # [N] global ids, or ignore_index
        ignore_index: int,
        vocabulary: VocabularySlice,
    ) -> Tensor:
        valid = targets != ignore_index
        ctx.terms = RowTerms(logits, targets, vocabulary)
        ctx.save_for_backward(logits, valid)
        return torch.where(valid, ctx.terms.losses(), 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, valid = ctx.saved_tensors
        grad = torch.empty_like(logits)
        ctx.terms.gradient(logits, torch.where(valid, grads[0], 0), out=grad)
        return grad, None, None, None


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    vocabulary: VocabularySlice | None = None,
) -> Tensor:
    """Sum of the cross entropies of the rows whose target is not ``ignore_index``.

    Args:
        logits: ``[N, V/t]``, this rank's slice of the vocabulary.
        targets: ``[N]``, global token ids, equal on all ranks.
        vocabulary: which slice that is, and how targets are smoothed; by default ``logits`` hold the whole vocabulary.

    Returns:
        a scalar, float32 (float64 for float64 logits), equal on all ranks.
    """
    vocabulary = vocabulary or VocabularySlice(0, logits.shape[1], logits.shape[1])
    return _VocabCrossEntropy.apply(logits, targets, ignore_index, vocabulary)
