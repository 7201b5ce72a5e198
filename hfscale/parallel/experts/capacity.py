"""Expert capacity: which routes an expert takes and which it drops. Pure functions of tensors.

Capacity is counted per sequence, so that what is dropped does not depend on the other sequences of a batch. First
choices come before second ones, and earlier tokens before later ones (Lepikhin et al. 2020, GShard; Fedus et al. 2021).
"""

import math
from typing import overload

import torch
from torch import Tensor

_ROUNDING = 1e-9  # 1.1 * 10 is a little more than 11


@overload
def room(tokens: int, factor: float, k: int, count: int) -> int: ...
@overload
def room(tokens: Tensor, factor: float, k: int, count: int) -> Tensor: ...
def room(tokens: int | Tensor, factor: float, k: int, count: int) -> int | Tensor:
    """Return an expert's capacity per sequence: ``factor * tokens * k / count``, rounded up, at most ``tokens``.

    Args:
        tokens: the number of tokens of a sequence; or of several, ``[b]``.
        k: routes per token.
        count: number of experts.
    """
    share = factor * k / count
    if isinstance(tokens, int):
        return min(tokens, math.ceil(tokens * share - _ROUNDING))
    return torch.minimum(tokens, (tokens.double() * share - _ROUNDING).ceil().to(tokens.dtype))


def count_each(numbers: Tensor, count: int) -> Tensor:
    """Count how often each number below ``count`` is in ``numbers [m]``, ``[count]``; does not wait for the device."""
    counts = torch.zeros(count, dtype=torch.int64, device=numbers.device)
    return counts.scatter_add_(0, numbers, torch.ones_like(numbers))


def queue_places(index: Tensor, count: int) -> Tensor:
    """Return ``[b, s, k]``: how many routes of the sequence come before each one at its expert.

    One sort, without waiting for the device. ``index [b, s, k]`` holds the experts, ``count`` for none.
    """
    samples, tokens, k = index.shape
    queues = torch.arange(samples, device=index.device).view(-1, 1, 1) * (count + 1) + index
    flat = queues.transpose(1, 2).reshape(-1)  # all first choices of a sequence, then all second ones
    order = flat.argsort(stable=True)
    lengths = count_each(flat, samples * (count + 1))
    starts = lengths.cumsum(0) - lengths
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), device=index.device) - starts[flat[order]]
    return places.view(samples, k, tokens).transpose(1, 2)
