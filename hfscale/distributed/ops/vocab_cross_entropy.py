"""Compute cross entropy over a vocabulary that is sharded over ranks; full logits never exist.

Each rank holds ``logits [N, V/t]`` for its slice of the vocabulary and reduces them to two numbers per token: the
log-sum-exp of its slice, and the logit of the target if the target is in its slice (else 0). After one all-gather of
these ``2 N`` numbers every rank computes the loss. (Megatron-LM, Shoeybi et al. 2019, section 3, has two reductions:
a maximum, then sums.) Label smoothing (Szegedy et al. 2016) needs a third number, the sum of the slice. The backward
pass needs no communication.

::

    rank 0: logits[:, :V/2] -> lse0, target0 --+ all-gather   lse = logaddexp(lse0, lse1)
    rank 1: logits[:, V/2:] -> lse1, target1 --+              loss = sum(lse - (target0 + target1))

Rows are processed in blocks, in float32 (float64 for float64 logits), so that no second ``[N, V/t]`` buffer in that
dtype is needed. :class:`RowTerms` implements the arithmetic, both for this operator and for the operator that also runs
the head (:mod:`hfscale.distributed.ops.head_cross_entropy`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import collectives
from .fused import fused, is_fused

# Entries of a block of rows: few enough to stay in a CPU's cache, enough to use all of a GPU.
_BLOCK_ELEMENTS = 1 << 20
_BLOCK_ELEMENTS_GPU = 1 << 26


@dataclass(frozen=True)
class VocabularySlice:
    """Describe this rank's slice of the vocabulary."""

    start: int  # the first token id of this rank's slice
    size: int  # number of token ids in the full vocabulary
    widest: int  # number of token ids in the longest slice; equal on all ranks
    # The group of the tensor-parallel ranks; ``None`` if this rank holds the full vocabulary.
    group: dist.ProcessGroup | None = None
    # Fraction of the target's probability that is spread evenly over the full vocabulary.
    smoothing: float = 0.0


@dataclass(frozen=True)
class Targets:
    """Hold, for some rows, the columns of their targets in this rank's logits, ``[n, 1]``."""

    places: Tensor  # column in this rank's slice; 0 for a target outside of the slice
    # whether the target is outside of the slice; ``None`` if all targets are inside
    missed: Tensor | None

    @classmethod
    def of_slice(
        cls, targets: Tensor, vocabulary: VocabularySlice, width: int, known: bool = False
    ) -> "Targets":
        """Locate ``targets [n]``, equal on all ranks, in a slice of ``width`` columns; targets outside hit no logit.

        ``known`` targets have been checked to be in the vocabulary, so a slice of the full vocabulary has all of them.
        """
        if known and vocabulary.group is None:
            return cls(targets.unsqueeze(1), None)
        places = (targets - vocabulary.start if vocabulary.start else targets).unsqueeze(1)
        missed = (places < 0) | (places >= width)
        return cls(places.masked_fill(missed, 0), missed)

    def split(self, step: int) -> "list[Targets]":
        """Split into chunks of ``step`` rows."""
        places = self.places.split(step)
        missed = [None] * len(places) if self.missed is None else self.missed.split(step)
        return list(map(Targets, places, missed))

    def kept(self, values: Tensor) -> Tensor:
        """Return ``values`` (``[n, 1]``, or one value for all rows), 0 for rows with a target outside the slice."""
        if self.missed is None:
            return values if values.ndim else values.expand(self.places.shape)
        return values.masked_fill(self.missed, 0)


class RowTerms:
    """Compute the losses of some rows, and their gradients by this rank's slice of the logits, ``[n, V/t]``."""

    def __init__(self, logits: Tensor, targets: Targets, vocabulary: VocabularySlice) -> None:
        self.vocabulary = vocabulary
        self.targets = targets
        compute = compute_dtype(logits.dtype)
        hit = targets.kept(logits.gather(1, targets.places).to(compute))
        self._rows = _rows_per_block(logits)
        parts = [_log_sum_exp(rows, compute) for rows in logits.split(self._rows)]
        terms = [parts[0] if len(parts) == 1 else torch.cat(parts), hit]
        if vocabulary.smoothing:
            terms.append(logits.sum(-1, keepdim=True, dtype=compute))
        if vocabulary.group is not None:
            everyone = gathered(torch.stack(terms), vocabulary.group)  # [t, k, n, 1]
            terms = list(torch.cat((everyone[:, :1].logsumexp(0), everyone[:, 1:].sum(0))))
        self.lse = terms[0]
        self._sums = terms[1:]

    def losses(self) -> Tensor:
        """Return the losses ``[n, 1]``, equal on all ranks."""
        eps = self.vocabulary.smoothing
        if not eps:
            return self.lse - self._sums[0]
        return self.lse - (1 - eps) * self._sums[0] - eps / self.vocabulary.size * self._sums[1]

    def hits(self, logits: Tensor) -> Tensor:
        """Return for each row whether no logit is above the target's logit, ``[n]``; equal on all ranks."""
        top = logits.amax(-1).to(self.lse.dtype)
        if self.vocabulary.group is not None:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=self.vocabulary.group)
        return self._sums[0].squeeze(1) >= top

    def gradient(self, logits: Tensor, scale: Tensor, reuse: bool = False) -> Tensor:
        """Return ``scale * d losses / d logits``; ``scale`` is ``[]`` or ``[n, 1]``.

        With ``reuse``, the result is written into ``logits``.
        """
        hit = self.targets.kept((self.vocabulary.smoothing - 1) * scale)
        if is_fused(logits.device) and logits.numel():
            spread = self.vocabulary.smoothing / self.vocabulary.size
            return _gradient(
                logits, self.lse, self.targets.places, hit.to(self.lse.dtype), scale, spread, reuse
            )
        out = logits if reuse else torch.empty_like(logits)
        for start in range(0, len(logits), self._rows):
            rows = slice(start, start + self._rows)
            # d loss / d logits = softmax - one_hot(target); computed in the output buffer only if the dtype matches
            wide = logits[rows].to(self.lse.dtype)
            into = out[rows]
            each = scale if scale.ndim == 0 else scale[rows]
            own = into if into.dtype == wide.dtype else None
            probabilities = torch.sub(wide, self.lse[rows], out=own).exp_()
            probabilities.mul_(each)
            if self.vocabulary.smoothing:
                probabilities.sub_(self.vocabulary.smoothing / self.vocabulary.size * each)
            hits = hit[rows].to(probabilities.dtype)
            probabilities.scatter_add_(1, self.targets.places[rows], hits)
            if own is None:
                into.copy_(probabilities)
        return out


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over the vocabulary are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gathered(terms: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather ``terms``, of any shape, over the ``t`` ranks of ``group`` into ``[t, ...]``."""
    every = terms.new_empty(dist.get_world_size(group), *terms.shape)
    collectives.all_gather_single(every.view(-1), terms.reshape(-1), group)
    return every


@fused
def _log_sum_exp(logits: Tensor, compute: torch.dtype) -> Tensor:
    return torch.logsumexp(logits.to(compute), -1, keepdim=True)


@fused
def _gradient(
    logits: Tensor,
    lse: Tensor,
    places: Tensor,
    hit: Tensor,
    scale: Tensor,
    spread: float,
    reuse: bool,
) -> Tensor:
    """Return the gradient of the rows' losses by ``logits [n, V/t]``, times ``scale``, in one pass over the logits."""
    gradient = ((logits.to(lse.dtype) - lse).exp() - spread) * scale
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = torch.where(columns == places, gradient + hit, gradient).to(logits.dtype)
    return logits.copy_(gradient) if reuse else gradient


def _rows_per_block(logits: Tensor) -> int:
    """Return the number of rows that are processed at once."""
    if is_fused(logits.device):  # one block: the fused kernel needs no float32 buffer
        return max(1, len(logits))
    budget = _BLOCK_ELEMENTS if logits.device.type == "cpu" else _BLOCK_ELEMENTS_GPU
    return max(1, budget // max(1, logits.shape[1]))


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
        ctx.terms = RowTerms(
            logits,
            Targets.of_slice(targets, vocabulary, logits.shape[1]),
            vocabulary,
        )
        ctx.save_for_backward(logits, valid)
        return torch.where(valid, ctx.terms.losses().squeeze(1), 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, valid = ctx.saved_tensors
        return (
            ctx.terms.gradient(
                logits,
                torch.where(valid, grads[0], 0).unsqueeze(1),
            ),
            None,
            None,
            None,
        )


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    vocabulary: VocabularySlice | None = None,
) -> Tensor:
    """Return the sum of the cross entropies of the rows whose target is not ``ignore_index``, in float32 or float64.

    Args:
        logits: ``[N, V/t]``, this rank's slice.
        targets: ``[N]``, global token ids, equal on all ranks.
        ignore_index: the target of rows that do not count.
        vocabulary: this rank's slice of the vocabulary; by default the full vocabulary.
    """
    vocabulary = vocabulary or VocabularySlice(0, logits.shape[1], logits.shape[1])
    return _VocabCrossEntropy.apply(logits, targets, ignore_index, vocabulary)
