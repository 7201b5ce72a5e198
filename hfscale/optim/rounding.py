"""Stochastic rounding to bfloat16: up or down at random, so that the mean is right (Gupta et al. 2015).

A bfloat16 is the upper half of a float32. A random number of 16 bits is added to the lower half, which is then cut off:
a value a third of the way between two neighbours becomes the upper one a third of the time. The numbers are a hash of
the seed, the update's number, the parameter's name and the entry's index in the full tensor, so replicas of an entry
are rounded alike in every layout, without communication.
"""

import hashlib
from math import prod

import torch
from torch import Tensor

from ..distributed.ops.fused import fused, is_fused
from ..plan import ParameterPlan
from ..plan.cut import share_spans

_CHUNK = 1 << 20  # entries at a time: their random numbers take 8 bytes each
_LOW = (1 << 16) - 1
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of SplitMix64 (Steele et al. 2014), signed


def key_of(seed: int, update: int, name: str) -> int:
    """Return the hash key of a parameter's random numbers in one update; 63 bits."""
    digest = hashlib.blake2b(f"{seed} {update} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def places_of(planned: ParameterPlan, ranks: dict[str, int], device: torch.device) -> list[Tensor]:
    """Return indices of the shard at ``ranks`` in the full tensor: per dim, the terms that add up to a flat index."""
    spans = share_spans(planned.shape, planned.cuts, ranks)
    strides = [prod(planned.shape[dim + 1 :]) for dim in range(len(planned.shape))]
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    return [
        torch.cat([empty, *(torch.arange(start, stop, device=device) for start, stop in pieces)]) * stride
        for pieces, stride in zip(spans, strides, strict=True)
    ]


def write_rounded(share: Tensor, wide: Tensor, places: list[Tensor], key: int) -> None:
    """Round ``wide``, float32, into ``share``, bfloat16 of the same shape, whose entries have the indices ``places`` by
    dim (:func:`places_of`); NaN and infinity are cast.
    """
    if share.numel() == 0:
        return
    # A tensor, since a number would be compiled in.
    shift = torch.full((), key, dtype=torch.int64, device=wide.device)
    if not places:  # a scalar
        share.copy_(_rounded(wide.reshape(1), shift, torch.zeros(1, dtype=torch.int64, device=wide.device))[0])
        return
    by_dim = [
        each.view(*(1 for _ in range(dim)), -1, *(1 for _ in places[dim + 1 :])) for dim, each in enumerate(places)
    ]
    rows = share.shape[0] if is_fused(share.device) else max(1, _CHUNK // max(1, share[0].numel()))
    for begin in range(0, share.shape[0], rows):
        part = slice(begin, begin + rows)
        share[part].copy_(_rounded(wide[part], shift, by_dim[0][part], *by_dim[1:]))


@fused
def _rounded(wide: Tensor, key: Tensor, *places: Tensor) -> Tensor:
    noise = (_hashed(sum(places[1:], places[0]), key) & _LOW).to(torch.int32)
    cut = ((wide.contiguous().view(torch.int32) + noise) & ~_LOW).view(torch.float32)
    return torch.where(wide.isfinite(), cut, wide).to(torch.bfloat16)


def _hashed(places: Tensor, key: Tensor) -> Tensor:
    """Return SplitMix64 of the indices; products wrap around."""
    x = (places + 1) * _MIX[0] + key
    x = (x ^ _shifted(x, 30)) * _MIX[1]
    x = (x ^ _shifted(x, 27)) * _MIX[2]
    return _shifted(x ^ _shifted(x, 31), 16)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
