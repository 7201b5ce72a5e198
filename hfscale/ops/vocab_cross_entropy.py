"""Cross entropy over a vocabulary that is cut over ranks; full logits never exist.

Each rank holds ``logits [N, V/t]`` for its slice of the vocabulary and reduces them to two numbers per token: the
log-sum-exp of its slice and the logit of the target, where the target lies in its slice. One all-gather of those
``2 N`` numbers gives the loss everywhere. (Megatron-LM, Shoeybi et al. 2019, section 3, reduces twice: a maximum, then
the sums.) The backward pass needs no communication.

::

    rank 0: logits[:, :V/2] -> lse0, target0 --+ all-gather   lse = logaddexp(lse0, lse1)
    rank 1: logits[:, V/2:] -> lse1, target1 --+              loss = sum(lse - (target0 + target1))

Rows are worked in chunks, in float32 (float64 for float64 logits), so that no second ``[N, V/t]`` buffer is needed:
with ``overwrite`` the gradient is written into the logits themselves.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 20  # per chunk of rows: small enough to stay in cache on a CPU, large enough to fill a GPU
_CHUNK_ELEMENTS_GPU = 1 << 26


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [N, V/t]
        targets: Tensor,  # [N] global ids, or ignore_index
        start: int,
        ignore_index: int,
        overwrite: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        compute = torch.float64 if logits.dtype == torch.float64 else torch.float32
        valid = targets != ignore_index
        local = targets - start
        owned = valid & (local >= 0) & (local < logits.shape[1])
        local = torch.where(owned, local, 0)
        lse = torch.empty(logits.shape[0], dtype=compute, device=logits.device)
        for rows in _chunks(logits):
            torch.logsumexp(logits[rows].to(compute), -1, out=lse[rows])
        target_logit = logits.gather(1, local[:, None]).squeeze(1).to(compute)
        target_logit = torch.where(owned, target_logit, 0)
        if group is not None:
            mine = torch.stack((lse, target_logit))
            pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(pieces, mine, group=group)
            everyone = torch.stack(pieces)  # [t, 2, N]
            lse, target_logit = everyone[:, 0].logsumexp(0), everyone[:, 1].sum(0)
        ctx.save_for_backward(logits, lse, local, owned, valid)
        ctx.overwrite = overwrite
        return torch.where(valid, lse - target_logit, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, lse, local, owned, valid = ctx.saved_tensors
        grad = logits if ctx.overwrite else torch.empty_like(logits)
        scale = torch.where(valid, grads[0], 0)[:, None]  # [N, 1]
        for rows in _chunks(logits):
            # d loss / d logits = softmax - one_hot(target); the buffer is reused only where it has the right type
            chunk = logits[rows].to(lse.dtype)
            probabilities = torch.sub(chunk, lse[rows, None], out=grad[rows] if grad.dtype == lse.dtype else None)
            probabilities.exp_().mul_(scale[rows])
            hit = -(owned[rows, None] * scale[rows]).to(lse.dtype)
            probabilities.scatter_add_(1, local[rows, None], hit)
            if grad.dtype != lse.dtype:
                grad[rows] = probabilities
        return grad, None, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    budget = _CHUNK_ELEMENTS if logits.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    step = max(1, budget // max(1, logits.shape[1]))
    return [slice(i, i + step) for i in range(0, logits.shape[0], step)]


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    start: int = 0,
    ignore_index: int = -100,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum of the cross entropies of the rows whose target is not ``ignore_index``.

    Args:
        logits: ``[N, V/t]``, this rank's slice of the vocabulary.
        targets: ``[N]``, global token ids, equal on all ranks of ``group``.
        start: the first token id of this rank's slice.
        overwrite: the backward pass may write the gradient into ``logits``: only where nothing else reads them.
        group: the tensor ranks; ``None`` for one rank, which holds the whole vocabulary.

    Returns:
        a scalar, float32 (float64 for float64 logits), equal on all ranks.
    """
    return _VocabCrossEntropy.apply(logits, targets, start, ignore_index, overwrite, group)
