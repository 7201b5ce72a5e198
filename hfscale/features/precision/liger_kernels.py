"""Liger's kernels for norms, gated activations and rotary embeddings, as a part (Hsu et al. 2024).

Each works on one token, or on one head of one token, so inside of a block it works on shards too. The loss stays
hfscale's: Liger's needs the full head.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..._compat.liger import (
    LOSSES,
    activation_of,
    applies,
    computes_in,
    give_kernels,
    is_installed,
    keep_gradients,
    switches_of as switches_of_family,
)
from ..._compat.transformers.classes import class_name
from ...errors import ConfigError
from ...models.module_kinds import holds_experts, takes_routes
from ...train.runtime import Part, Runtime
from ...train.runtime.parameter_names import stock_name
from ...train.runtime.shards import LocalWeights
from ...train.runtime.snapshot import Undo, watch

_ACTIVATIONS = ("act_fn", "activation_fn", "act")  # attribute names of the activation in stock MLPs


def check_kernels(
    asked: bool | Mapping[str, bool],
    family: str,
    device: torch.device,
) -> None:
    """Check :attr:`hfscale.config.options.Options.use_liger_kernel` before anything is loaded; ``family`` is the
    config's ``model_type``. Raise :class:`ConfigError` if the kernels are not installed, are not for this family or
    device, or would replace the loss.
    """
    said = f"use_liger_kernel={asked!r}"
    if not is_installed():
        raise ConfigError(
            f"{said} needs Liger's kernels, which are not installed: pip install liger-kernel"
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"{said} needs a GPU, and this rank computes on the CPU: leave it out, or try TRITON_INTERPRET=1, which "
            "runs Triton's kernels slowly in Python"
        )
    known = switches_of_family(family)
    if known is None:
        raise ConfigError(f"{said}: Liger has no kernels for {family}: leave it out")
    given = asked if isinstance(asked, Mapping) else {}
    for name in given:
        if name not in known:
            others = ", ".join(kernel for kernel in known if kernel not in LOSSES)
            raise ConfigError(
                f"{said}: {name} is none of Liger's kernels for {family}: use {others}"
            )


class LigerKernels(Part):
    """Install Liger's kernels as a part, if the user requested them."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install the kernels, before block edges and recomputation are installed around the modules."""
        asked: Any = runtime.options.use_liger_kernel
        model = runtime.model
        for parameter in model.parameters():
            if (
                parameter.is_floating_point()
                and not computes_in(parameter.dtype)
                and parameter.dtype.itemsize > 1
            ):
                raise ConfigError(
                    f"use_liger_kernel={asked!r}: Liger's kernels compute in 32 bits, and this model has weights in "
                    f"{parameter.dtype}: leave it out, or load the model with dtype=torch.float32"
                )
        look_again = watch(model)
        modules = set(model.modules())
        try:
            give_kernels(model, {} if asked is True else asked)
        except (
            AttributeError,
            ImportError,
            TypeError,
        ) as error:  # a class or version that Liger does not know
            raise ConfigError(
                f"use_liger_kernel={asked!r}: Liger has no kernels for {class_name(model)} ({error}): leave it out"
            ) from error
        changes = look_again().changes
        if modules == set(model.modules()) and not any(changed for *_, changed, _ in changes):
            raise ConfigError(
                f"use_liger_kernel={asked!r}: Liger has only the loss for {class_name(model)}, which hfscale "
                "computes itself: leave it out"
            )
        # not placeholders of other stages, nor experts, which may differ
        here = (m for name, m in model.named_modules() if runtime.is_local(stock_name(name)))
        kept = {id(m) for m in here if not holds_experts(m) and not takes_routes(m)}
        Undo([change for change in changes if id(change[0]) not in kept])()
        for module, *_ in changes:
            if id(module) in kept:
                _check_activation(module)
                keep_gradients(module)


def _check_activation(module: nn.Module) -> None:
    """Refuse an activation that Liger would replace by another: it checks the config only when it creates a module."""
    kernel = activation_of(module)
    activation: Any = next(
        (getattr(module, name) for name in _ACTIVATIONS if hasattr(module, name)), None
    )
    if kernel is not None and activation is not None and not applies(activation, kernel):
        switch = "swiglu" if kernel == "silu" else "geglu"
        raise ConfigError(
            f"use_liger_kernel: Liger's kernel for {type(module).__name__} applies {kernel}, and this model's config "
            f"asks for {type(activation).__name__}: pass use_liger_kernel={{{switch!r}: False}}"
        )
