"""Copies of weights in 16 bits that all microbatches of a step share, as a part.

Where microbatches run one after the other, the copies of one are gone when the next begins. Where several are under
way in a pipeline stage, each would keep its own of every weight: the first of eight stages eight under 1F1B.

Projections, trained and frozen, use :mod:`hfscale.ops.shared_casts`, and so do those whose gradients are taken apart.
What else trains (convolutions, routers) autocast itself remembers for as long as a step is within it. Recomputation by
the host may be the reentrant one, whose first pass has no graph; autocast would remember copies without one, so it
forgets there, and layers that are recomputed keep none anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from .._host.torch import autocast_remembers, own_parameters
from .._host.transformers.computing import recomputes
from ..families.projections import PROJECTIONS
from ..ops.shared_casts import Casts, autocasted_weight, is_sharing, sharing
from ..runtime import Part, Runtime
from ..runtime.local_weights import LocalWeights
from ..runtime.mixed_weights import shares_casts


class SharedCasts(Part):
    """Nothing without mixed precision, stages, or over several data ranks, whose wrapper casts what it gathers."""

    def __init__(self) -> None:
        self._active = False

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Inside of everything: who takes a projection's products apart casts its weight by itself."""
        self._active = shares_casts(runtime)
        if not self._active:
            return
        for module in runtime.model.modules():
            if type(module) in PROJECTIONS:  # a subclass may look at the type of its weight
                module.forward = partial(_with_shared_cast, module, module.forward)

    @contextmanager
    def around_interleaved(self, runtime: Runtime, backward: bool) -> Iterator[None]:
        """The weights stay as they are within."""
        if not self._active:
            yield
            return
        with sharing(Casts()), nullcontext() if recomputes(runtime.model) else autocast_remembers():
            yield


def _with_shared_cast(module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """A projection's own forward pass, over the copy of its weight."""
    held = own_parameters(module)
    weight = held.get("weight")
    if torch.compiler.is_compiling() or weight is None or weight.dtype != torch.float32 or not is_sharing():
        return forward(*args, **kwargs)
    held["weight"] = autocasted_weight(weight)
    try:
        return forward(*args, **kwargs)
    finally:
        held["weight"] = weight
