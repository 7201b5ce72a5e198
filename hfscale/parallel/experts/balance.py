"""Load balancing of experts: losses, bias updates and metrics. Pure functions of tensors.

All sums run over a sequence's real (unpadded) tokens. Callers whose ranks have parts of a sequence add up
:func:`expert_sums` over them first; callers with several microbatches or batches add up the losses, and divide them by
the step's number of real tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .routers import probabilities, widened


def expert_sums(logits: Tensor, index: Tensor, real: Tensor, scores: str) -> Tensor:
    """Return the sums per sequence from which :func:`balance_loss` and :func:`z_loss` are made; differentiable.

    Args:
        logits: ``[b, s, e]``, the router's.
        index: ``[b, s, k]``, the chosen experts before any is dropped for capacity; ``e`` for none.
        real: ``[b, s]``, true for tokens that are not padding.

    Returns:
        ``[b, 2 e + 1]``: routes to each expert, the sum of its probability, and the sum of the squared logsumexp.
    """
    count = logits.shape[-1]
    of_real = real.to(widened(logits).dtype).unsqueeze(-1)
    mass = (probabilities(logits, scores) * of_real).sum(1)
    logsumexp = widened(logits).logsumexp(-1, keepdim=True)
    squares = (logsumexp.square() * of_real).sum(1)
    routes = expert_counts(index, count, real).to(mass.dtype)
    return torch.cat((routes, mass, squares), -1)


def expert_counts(index: Tensor, count: int, real: Tensor) -> Tensor:
    """Count the routes of each sequence to each expert: ``index [b, s, k]``, ``real [b, s]`` -> ``[b, count]``."""
    routes = index.flatten(1)
    weights = real.unsqueeze(-1).expand_as(index).flatten(1).to(torch.int64)
    counts = torch.zeros(len(routes), count + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(1, routes, weights)[:, :count]


def balance_loss(sums: Tensor) -> Tensor:
    """Return the load-balancing loss, the sum over sequences of (loss of the sequence) x (its number of tokens).

    ``experts * sum_i f_i P_i`` with ``f_i`` the share of the sequence's routes that go to expert ``i`` and ``P_i`` the
    mean of its probability (Fedus et al. 2021, equations 4 to 6; per sequence in DeepSeek-AI 2024, V3, equations 17 to
    20). It is 1 where both are even.

    Args:
        sums: ``[b, 2 e + 1]``, see :func:`expert_sums`.
    """
    count = sums.shape[1] // 2
    routes, mass = sums[:, :count], sums[:, count : 2 * count]
    share = routes / routes.sum(1, keepdim=True).clamp(min=1)
    # The number of tokens, over which the mass would be averaged, cancels.
    return count * (share * mass).sum()


def z_loss(sums: Tensor) -> Tensor:
    """Return the router z-loss, summed over tokens: squared logsumexp of the logits (Zoph et al. 2022, equation 5)."""
    return sums[:, -1].sum()


def bias_step(counts: Tensor, rate: float) -> Tensor:
    """Return the update of the experts' biases, given their loads ``counts [e]`` (Wang et al. 2024, algorithm 1)."""
    loads = counts.double()
    return rate * (loads.mean() - loads).sign()


def max_over_mean(counts: Sequence[int]) -> float:
    """Return the largest load divided by the mean load: 1 at balance, and where there is no load."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def normalized_entropy(counts: Sequence[int]) -> float:
    """Return the entropy of the loads over its maximum: 1 at balance (or without load), 0 if one expert has all."""
    total = sum(counts)
    if not total or len(counts) == 1:
        return 1.0
    shares = torch.tensor(counts, dtype=torch.float64) / total
    return float(torch.special.entr(shares).sum()) / float(torch.tensor(float(len(counts))).double().log())
