"""Choose experts from router logits, limit them by capacity, and measure their balance: pure functions of tensors.

Routers return ``index [n, k]`` (experts) and ``weights [n, k]`` of ``n`` tokens, the best choice first, with gradients
to the logits ``[n, e]`` over ``e`` experts. An index of ``e`` means that the token is dropped: it is sent to no expert
for this choice.

Capacity is counted per sequence, so that dropped tokens do not depend on the other sequences of a batch. First choices
take precedence over second choices, and earlier tokens over later tokens (Lepikhin et al. 2020, GShard; Fedus et al.
2021).

Losses are computed from sums over the tokens of a sequence without padding. Under context or sequence parallelism, sum
:func:`expert_sums` over the ranks before computing a loss. Over microbatches, sum the losses, and divide by the number
of tokens of the step without padding.
"""

import math
from typing import TypeVar

import torch
from torch import Tensor

_ROUNDING = 1e-9  # subtracted before rounding up, because in floating point 1.1 * 10 is a little more than 11
_Number = TypeVar("_Number", int, Tensor)


def probabilities(logits: Tensor, scores: str = "softmax") -> Tensor:
    """Return probabilities ``[n, e]``, in at least 32 bits: softmax, or sigmoids divided by their sum (DeepSeek-AI
    2024, V3).
    """
    logits = widened(logits)
    if scores == "softmax":
        return logits.softmax(-1)
    gates = logits.sigmoid()
    return gates / (gates.sum(-1, keepdim=True) + 1e-20)


def switch(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the best expert, weighted by its probability (Fedus et al. 2021, Switch Transformers, equation 2)."""
    weights, index = probabilities(logits).max(-1, keepdim=True)
    return index, weights


def gshard(logits: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the best two experts; drop the second unless twice its weight exceeds ``draws [n]`` (Lepikhin et al. 2020,
    algorithm 1). ``draws=None`` keeps both.
    """
    best, index = probabilities(logits).topk(2, dim=-1)
    weights = best / best.sum(-1, keepdim=True)
    if draws is not None:
        taken = 2 * weights.detach()[:, 1] > draws
        index = torch.stack(
            (
                index[:, 0],
                index[:, 1].where(taken, logits.shape[-1]),
            ),
            1,
        )
    return index, weights


def noisy_topk(logits: Tensor, k: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose the best ``k`` experts by logits plus ``noise [n, e]``, weighted by the softmax of their ``k`` noisy
    logits (Shazeer et al. 2017, equations 3-5).
    """
    logits = widened(logits)
    best, index = (logits if noise is None else logits + noise).topk(k, dim=-1)
    return index, best.softmax(-1)


def round_robin(index: Tensor, count: int) -> Tensor:
    """Return expert indices 0, 1, ..., ``count - 1`` in turn, in the shape of ``index``, so that the loads of any two
    experts differ by one at most.
    """
    return torch.arange(index.numel(), device=index.device).remainder_(count).view_as(index)


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in at least 32 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def room(tokens: _Number, factor: float, k: int, count: int) -> _Number:
    """Return the largest number of tokens that each expert accepts from a sequence of ``tokens``: ``factor`` times the
    mean ``tokens * k / count`` of ``count`` experts, rounded up, at most ``tokens``.
    """
    share = factor * k / count
    if isinstance(tokens, int):
        return min(tokens, math.ceil(tokens * share - _ROUNDING))
    return torch.minimum(
        tokens,
        (tokens.double() * share - _ROUNDING).ceil().to(tokens.dtype),
    )


def count_each(numbers: Tensor, count: int) -> Tensor:
    """Count how often each number below ``count`` is in ``numbers [m]``, without a host synchronization."""
    counts = torch.zeros(count, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))


def queue_places(index: Tensor, count: int) -> Tensor:
    """Return ``[b, s, k]``: for each token's expert in ``index [b, s, k]``, how many tokens of the sequence take
    precedence at this expert.

    All first choices precede all second choices, and earlier tokens precede later ones. The index ``count`` means a
    dropped token. The host does not wait for the device.
    """
    samples, tokens, k = index.shape
    queues = torch.arange(samples, device=index.device).view(-1, 1, 1) * (count + 1) + index
    # All first choices of a sequence, then all second choices.
    flat = queues.transpose(1, 2).reshape(-1)
    order = flat.argsort(stable=True)
    lengths = count_each(flat, samples * (count + 1))
    starts = lengths.cumsum(0) - lengths
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), device=index.device) - starts[flat[order]]
    return places.view(samples, k, tokens).transpose(1, 2)


def expert_sums(logits: Tensor, index: Tensor, real: Tensor, scores: str) -> Tensor:
    """Return the per-sequence sums ``[b, 2 e + 1]`` over tokens from which the router losses are computed: for each
    expert, the number of tokens that chose it; for each expert, its probability; and the squared logsumexp of the
    logits.

    The sums have gradients to the logits.

    Args:
        logits: ``[b, s, e]``.
        index: ``[b, s, k]``, the chosen experts, before any are dropped because of the capacity.
        real: ``[b, s]``, true for tokens that are not padding.
        scores: ``"softmax"`` or ``"sigmoid"``: see :func:`probabilities`.
    """
    count = logits.shape[-1]
    of_real = real.to(widened(logits).dtype).unsqueeze(-1)
    mass = (probabilities(logits, scores) * of_real).sum(1)
    logsumexp = widened(logits).logsumexp(-1, keepdim=True)
    squares = (logsumexp.square() * of_real).sum(1)
    routes = expert_counts(index, count, real).to(mass.dtype)
    return torch.cat((routes, mass, squares), -1)


def expert_counts(index: Tensor, count: int, real: Tensor) -> Tensor:
    """Return ``[b, count]``: how many tokens of each sequence chose each of ``count`` experts, given the choices
    ``index [b, s, k]``. Tokens that are false in ``real [b, s]`` (padding) do not count.
    """
    routes = index.flatten(1)
    weights = real.unsqueeze(-1).expand_as(index).flatten(1).to(torch.int64)
    counts = torch.zeros(
        len(routes),
        count + 1,
        dtype=torch.int64,
        device=index.device,
    )
    return counts.scatter_add_(1, routes, weights)[:, :count]


def balance_loss(sums: Tensor) -> Tensor:
    """Return the load-balancing loss from ``sums`` (:func:`expert_sums`): each sequence's loss times the number of its
    tokens, summed over sequences.

    A sequence's loss is ``experts * sum_i f_i P_i``, where ``f_i`` is the fraction of the sequence's choices (``k`` per
    token) that are expert ``i``, and ``P_i`` is the mean probability of expert ``i`` (Fedus et al. 2021, equations 4 to
    6; per sequence in DeepSeek-AI 2024, V3, equations 17 to 20). It is 1 if ``f`` and ``P`` are uniform.
    """
    count = sums.shape[1] // 2
    routes = sums[:, :count]
    mass = sums[:, count : 2 * count]
    share = routes / routes.sum(1, keepdim=True).clamp(min=1)
    # The mean probability divides by the number of tokens, and the loss is multiplied by this number: the two cancel.
    return count * (share * mass).sum()


def z_loss(sums: Tensor) -> Tensor:
    """Return the z-loss: the squared logsumexp of the logits, summed over tokens (Zoph et al. 2022, ST-MoE, equation
    5).
    """
    return sums[:, -1].sum()


def bias_step(counts: Tensor, rate: float) -> Tensor:
    """Return the update of the router's expert biases ``[e]``, given expert loads (Wang et al. 2024, algorithm 1)."""
    loads = counts.double()
    return rate * (loads.mean() - loads).sign()
