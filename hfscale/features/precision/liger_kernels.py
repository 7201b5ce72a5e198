"""Install Liger's kernels for norms, gated activations and rotary embeddings (Hsu et al. 2024).

Each kernel computes one token, or one head of one token, so inside a block it can compute shards too. The loss stays
hfscale's, since Liger's loss needs the full head.
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
    """Check the option ``use_liger_kernel`` (:class:`hfscale.config.options.Options`) before anything is loaded.

    Args:
        asked: the option's value.
        family: the config's ``model_type``.

    Raises:
        ConfigError: Liger is not installed, lacks kernels for this family, or one that ``asked`` names, or the device
            is a CPU without Triton's interpreter.
    """
    said = f"use_liger_kernel={asked!r}"
    if not is_installed():
        raise ConfigError(
            f"{said} needs Liger's kernels, but liger-kernel is not installed: pip install liger-kernel"
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"{said} needs a GPU, but this rank computes on the CPU: leave use_liger_kernel out, or set "
            "TRITON_INTERPRET=1, which runs Triton's kernels slowly in Python"
        )
    known = switches_of_family(family)
    if known is None:
        raise ConfigError(f"{said}: Liger has no kernels for {family}: leave use_liger_kernel out")
    given = asked if isinstance(asked, Mapping) else {}
    for name in given:
        if name not in known:
            others = ", ".join(kernel for kernel in known if kernel not in LOSSES)
            raise ConfigError(
                f"{said}: {name} is none of Liger's kernels for {family}: use {others}"
            )


class LigerKernels(Part):
    """Install Liger's kernels if ``use_liger_kernel`` requests them."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install the kernels, before tensor parallelism and recomputation wrap modules."""
        asked: Any = runtime.options.use_liger_kernel
        model = runtime.model
        for parameter in model.parameters():
            if (
                parameter.is_floating_point()
                and not computes_in(parameter.dtype)
                and parameter.dtype.itemsize > 1
            ):
                raise ConfigError(
                    f"use_liger_kernel={asked!r}: Liger's kernels compute in 32 bits, but this model has weights in "
                    f"{parameter.dtype}: leave use_liger_kernel out, or load the model with dtype=torch.float32"
                )
        look_again = watch(model)
        modules = set(model.modules())
        try:
            give_kernels(model, {} if asked is True else asked)
        except (
            AttributeError,
            ImportError,
            TypeError,
        ) as error:  # a class or version that Liger does not support
            raise ConfigError(
                f"use_liger_kernel={asked!r}: Liger has no kernels for {class_name(model)} ({error}): leave "
                "use_liger_kernel out"
            ) from error
        changes = look_again().changes
        if modules == set(model.modules()) and not any(changed for *_, changed, _ in changes):
            raise ConfigError(
                f"use_liger_kernel={asked!r}: in {class_name(model)}, Liger replaces only the loss, but hfscale "
                "computes the loss itself: leave use_liger_kernel out"
            )
        # Keep the kernels of all modules except stand-ins for other stages' modules, and experts, whose class may
        # differ.
        here = (m for name, m in model.named_modules() if runtime.is_local(stock_name(name)))
        kept = {id(m) for m in here if not holds_experts(m) and not takes_routes(m)}
        Undo([change for change in changes if id(change[0]) not in kept])()
        for module, *_ in changes:
            if id(module) in kept:
                _check_activation(module)
                keep_gradients(module)


def _check_activation(module: nn.Module) -> None:
    """Raise :class:`ConfigError` if Liger's kernel would replace the module's activation by another function. Liger
    itself checks the config only if it creates the module.
    """
    kernel = activation_of(module)
    activation: Any = next(
        (getattr(module, name) for name in _ACTIVATIONS if hasattr(module, name)), None
    )
    if kernel is not None and activation is not None and not applies(activation, kernel):
        switch = "swiglu" if kernel == "silu" else "geglu"
        raise ConfigError(
            f"use_liger_kernel: Liger's kernel for {type(module).__name__} applies {kernel}, but this model's "
            f"activation is {type(activation).__name__}: pass use_liger_kernel={{{switch!r}: False}}"
        )
