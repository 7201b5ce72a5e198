"""Control when FSDP2 frees the full weights that it gathers for a forward pass."""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..._compat.torch_fsdp import gather_root, managed_places
from ..._compat.transformers.classes import class_name
from ...errors import ConfigError


def reshard(model: nn.Module) -> None:
    """Free gathered weights, also those kept after a forward pass without a backward pass."""
    for module in model.modules() if isinstance(model, FSDPModule) else ():
        if isinstance(module, FSDPModule):
            module.reshard()


def refuse_calls_past_the_model(model: Any) -> None:
    """Refuse calls of the base model alone: FSDP2 gathers weights around the layers only when the model is called."""
    inside = getattr(model, "base_model", model)
    if inside is model:
        return
    modules = set(inside.modules())
    around = next((place for place in managed_places(model, inner=False) if place.module in modules), None)
    if around is None:
        return

    def refuse(*_: Any) -> None:
        if not around.is_gathered():
            raise ConfigError(
                f"{type(inside).__name__} was called past {class_name(model)}, for which alone FSDP2 gathers the "
                f"weights around the layers ({around.name} of {type(around.module).__name__}, for one): call the model "
                "itself (output_hidden_states=True gives what its layers make), or load the class without a head"
            )

    inside.register_forward_pre_hook(refuse)


def give_up_whole_weights(model: Any) -> None:
    """Reshard the model's parameters after a pass without gradients.

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
        gather_root(model)  # an encoder is called by itself
        try:
            return generate(*args, **kwargs)  # for as many steps on all ranks: the host knows FSDP2's models
        finally:
            generating.pop()
            reshard(model)

    model.generate = generate_then_reshard
