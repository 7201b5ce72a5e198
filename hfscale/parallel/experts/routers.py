"""Routers: choose each token's experts by its logits. Pure functions of tensors.

Each returns ``index [n, k]`` and ``weights [n, k]``, the best choice first; weights are differentiable in the logits
``[n, e]``. An index of ``e`` means that this route is not taken.
"""

import torch
from torch import Tensor


def probabilities(logits: Tensor, scores: str = "softmax") -> Tensor:
    """Return the experts' probabilities ``[n, e]``, in fp32 at least; each row sums to 1.

    Args:
        scores: ``"softmax"``, or ``"sigmoid"`` divided by its sum (DeepSeek-AI 2024, V3).
    """
    logits = widened(logits)
    if scores == "softmax":
        return logits.softmax(-1)
    each = logits.sigmoid()
    return each / (each.sum(-1, keepdim=True) + 1e-20)


def switch(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the best expert, weighted by its probability (Fedus et al. 2021, Switch Transformers, equation 2)."""
    weights, index = probabilities(logits).max(-1, keepdim=True)
    return index, weights


def gshard(logits: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the best two, weighted by their probabilities divided by the sum of the two.

    The second is taken with a chance of twice its weight (Lepikhin et al. 2020, GShard, algorithm 1), and always
    without ``draws``.

    Args:
        draws: ``[n]``, uniform in ``[0, 1)``; ``None`` in evaluation.
    """
    best, index = probabilities(logits).topk(2, dim=-1)
    weights = best / best.sum(-1, keepdim=True)
    if draws is not None:
        taken = 2 * weights.detach()[:, 1] > draws
        index = torch.stack((index[:, 0], index[:, 1].where(taken, logits.shape[-1])), 1)
    return index, weights


def noisy_topk(logits: Tensor, k: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the ``k`` largest logits after noise, weighted by their softmax (Shazeer et al. 2017, equations 3 to 5).

    Args:
        noise: ``[n, e]``, added to the logits; ``None`` in evaluation.
    """
    logits = widened(logits)
    best, index = (logits if noise is None else logits + noise).topk(k, dim=-1)
    return index, best.softmax(-1)


def round_robin(index: Tensor, count: int) -> Tensor:
    """Return experts in turn, in the shape of ``index``: loads differ by one at most, and a token's experts differ."""
    return torch.arange(index.numel(), device=index.device).remainder_(count).view_as(index)


def widened(x: Tensor) -> Tensor:
    """Cast ``x`` to fp32 if it has fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
