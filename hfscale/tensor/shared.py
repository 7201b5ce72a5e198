"""Parameters that a cut block uses whole: each rank sees a part of their gradient, and the parts must be summed.

Per-head norms read by cut heads are one case; the bias of a row projection is the other: it must enter the sum over
ranks once, so one rank adds it and the others add zero.

While such a module computes, it finds its parameter passed through :func:`hfscale.ops.enter`, so the sum happens in the
backward pass itself: it is right under gradient accumulation, under FSDP and in a plain ``loss.backward()`` loop, with
nothing to remember afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ..ops import enter


def read_through_enter(
    module: nn.Module, group: dist.ProcessGroup, names: Sequence[str] | None = None, once: bool = True
) -> None:
    """Let ``module`` compute with its parameters ``names`` (all of its own by default) passed through ``enter``.

    Args:
        once: whether this rank contributes the value; where ``False`` it computes with zeros, still with a gradient.
    """
    own = [name for name, parameter in module._parameters.items() if parameter is not None]
    chosen = [name for name in own if names is None or name in names]
    if not chosen:
        return
    forward: Callable[..., Any] = module.forward

    def shared_forward(*args: Any, **kwargs: Any) -> Any:
        # Only for the time of the computation: anyone else who looks (FSDP, optimizers, state dicts) sees the leaf.
        leaves = {name: module._parameters[name] for name in chosen}
        for name, leaf in leaves.items():
            value = enter(leaf, group)  # type: ignore[arg-type]
            module._parameters[name] = value if once else value * 0.0  # type: ignore[assignment]
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(leaves)

    module.forward = shared_forward  # type: ignore[method-assign]
