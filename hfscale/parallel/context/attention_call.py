"""Run one attention call on the engine."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .engine import Reading, Source, attend
from .kernels import kernel_for, padded_width
from .masks import MaskBlocks
from .seam import AttentionCall


def read(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: MaskBlocks, call: AttentionCall, source: Source
) -> Tensor:
    """Return the attention of ``q`` to all keys of ``source``; heads of queries and of values may differ in width."""
    width = v.shape[-1]
    widest = padded_width(max(q.shape[-1], width), q.device)
    if {q.shape[-1], width} != {widest}:  # zeros add nothing to scores, and are cut off an output
        q, k, v = (F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    if sinks is not None:
        mask = mask.without_idle()  # the sink is what is left to read
    kernel = kernel_for(q, call.scale, call.softcap, call.dropout, mask.idle is not None)
    seed = int(torch.randint(2**31, (), device="cpu")) if call.dropout else 0
    return attend(q.contiguous(), k.contiguous(), v.contiguous(), sinks, Reading(mask, kernel, source, seed))[
        ..., :width
    ]
