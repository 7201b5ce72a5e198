"""The whole weights that FSDP2 gathers for a forward pass, and when they are given up."""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(model: nn.Module) -> None:
    """Leave this rank its shards only, also where a forward pass without a backward pass has kept whole weights."""
    for module in model.modules() if isinstance(model, FSDPModule) else ():
        if isinstance(module, FSDPModule):
            module.reshard()


def give_up_whole_weights(model: Any) -> None:
    """Behind a pass without gradients, let the model's parameters be this rank's shards again.

    FSDP2 keeps the root's weights, and those of layers that are not spread, for a backward pass. Where none comes they
    stand in the place of the parameters: an optimizer made then would move them in vain, and ``zero_grad`` would miss
    every gradient. While tokens are generated they stay, and are given up at the end.
    """
    generating: list[bool] = []
    generate = getattr(model, "generate", None)

    def after(*_: Any) -> None:
        if not generating and not torch.is_grad_enabled():
            reshard(model)

    model.register_forward_hook(after)
    if generate is None:
        return

    @functools.wraps(generate)
    def generate_then_reshard(*args: Any, **kwargs: Any) -> Any:
        generating.append(True)
        try:
            return generate(*args, **kwargs)
        finally:
            generating.pop()
            reshard(model)

    model.generate = generate_then_reshard
