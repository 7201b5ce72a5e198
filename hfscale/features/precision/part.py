"""Mixed precision by autocast around the forward pass, where FSDP2 does not cast all; float16 scaling of the loss."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ..._compat.torch import autocast_remembers, own_parameters, unscale_and_check
from ..._compat.transformers.computing import recomputes
from ...config.options import MIXED_PRECISIONS
from ...distributed.ops.shared_casts import Casts, autocasted_weight, is_sharing, sharing
from ...errors import ConfigError
from ...models.module_kinds import PROJECTIONS
from ...models.precision import WIDENS_INSIDE
from ...train.runtime import Part, Runtime, local_tensor
from ...train.runtime.shards import LocalWeights, add_back, gradients_aside


class Autocast(Part):
    """Autocast the forward pass under mixed precision. Over several data ranks FSDP2 casts a layer's weights and
    inputs, so this is used only for families that compute in 32 bits inside their layers.
    """

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap ``model.forward`` in autocast."""
        dtype, model = MIXED_PRECISIONS[runtime.options.mixed_precision], runtime.model
        if dtype is None or (runtime.mesh.data_world > 1 and runtime.plan.family not in WIDENS_INSIDE):
            return
        forward: Callable[..., Any] = model.forward
        device = runtime.mesh.device.type

        def autocast_forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                return forward(*args, **kwargs)

        autocast_forward.__wrapped__ = forward  # type: ignore[attr-defined]  # transformers inspects its signature
        model.forward = autocast_forward


class SharedCasts(Part):
    """A part for mixed precision in pipeline stages without data ranks; over data ranks FSDP2 casts what it gathers."""

    def is_needed(self, runtime: Runtime) -> bool:
        """Return whether microbatches in flight share casts."""
        return runtime.shares_casts

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Wrap the projections' forward, inside of block edges; with deferred weight gradients those cast weights."""
        for module in runtime.model.modules():
            if type(module) in PROJECTIONS:  # a subclass may check the dtype of its weight
                module.forward = partial(_with_shared_cast, module, module.forward)

    @contextmanager
    def around_interleaved(self, runtime: Runtime, backward: bool) -> Iterator[None]:
        """Share casts inside the `with` block, in which the weights do not change."""
        with sharing(Casts()), nullcontext() if recomputes(runtime.model) else autocast_remembers():
            yield


def _with_shared_cast(module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a projection's own forward with the cast copy of its weight."""
    held = own_parameters(module)
    weight = held.get("weight")
    if torch.compiler.is_compiling() or weight is None or weight.dtype != torch.float32 or not is_sharing():
        return forward(*args, **kwargs)
    held["weight"] = autocasted_weight(weight)
    try:
        return forward(*args, **kwargs)
    finally:
        held["weight"] = weight


class LossScaling(Part):
    """Scale the loss under ``mixed_precision="fp16"``, with one scale and one decision to skip a step for all ranks
    (Micikevicius et al. 2018): gradients of activations below 6e-8 are zero in float16.

    ::

        loss x scale -> backward passes, sums over ranks -> gradients / scale -> any infinite, on any rank?
          no    .grad is unscaled; after `growth_interval` such steps the scale grows
          yes   .grad is None everywhere, so any optimizer leaves everything as it is; the scale shrinks

    The arithmetic is that of ``torch.amp.GradScaler``, which decides for the gradients of one process. FSDP2 averages
    the gradients it reduces; the loss is divided by the number of data ranks, so that activations get the gradients of
    one process. The ``scale`` is unchanged for the last ``growth`` steps, which did not overflow; so far ``skipped``
    steps were skipped, and ``overflowed`` says whether the last one was.
    """

    state_key = "LossScaling"

    def __init__(self) -> None:
        self.scale, self.growth, self.skipped, self.overflowed = 1.0, 0, 0, False
        self._within = False

    def is_needed(self, runtime: Runtime) -> bool:
        """Return whether activations are computed in float16."""
        return runtime.options.mixed_precision == "fp16"

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Refuse, by a hook, training passes outside of steps, whose loss would not be scaled."""
        self.scale = runtime.options.scaling.init_scale
        runtime.model.register_forward_pre_hook(self._refuse_unscaled)

    def loss_factor(self, runtime: Runtime) -> float:
        """Return the scale, divided by the factor of the data axes."""
        return self.scale / runtime.mesh.data_world

    @contextmanager
    def around_gradients(self, runtime: Runtime) -> Iterator[None]:
        """Unscale the gradients on leaving the `with` block, or drop them after an overflow."""
        parameters = [parameter for _, parameter in runtime.parameters() if parameter.requires_grad]
        with gradients_aside(parameters) as before:
            self._expect(runtime, self.scale)
            try:
                yield
            finally:
                self._expect(runtime, None)
        gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        here = unscale_and_check(gradients, runtime.mesh.data_world / self.scale)
        self.overflowed = bool(runtime.mesh.largest(float(here))[0])
        for parameter, gradient in zip(parameters, before, strict=True):
            if self.overflowed:
                parameter.grad = None
            else:
                add_back(parameter, gradient)
        how = runtime.options.scaling
        if self.overflowed:
            self.scale, self.growth, self.skipped = self.scale * how.backoff_factor, 0, self.skipped + 1
            return
        self.growth += 1
        if self.growth == how.growth_interval:
            grown = self.scale * how.growth_factor
            self.scale, self.growth = grown if math.isfinite(grown) else self.scale, 0

    def _expect(self, runtime: Runtime, scale: float | None) -> None:
        """Set the gradient with which backward passes begin; ``None`` outside of a step."""
        self._within = scale is not None
        if runtime.loss is not None:  # a user's loss computes no gradients in the forward pass
            runtime.loss.expected_gradient = 1.0 if scale is None else scale

    def metrics(self, runtime: Runtime) -> Mapping[str, float]:
        """Return the scale, and the counts of skipped steps."""
        return {
            "loss_scale": self.scale,
            "steps_since_loss_scale_changed": self.growth,
            "skipped_steps": self.skipped,
            "step_was_skipped": float(self.overflowed),
        }

    def state(self, runtime: Runtime) -> dict[str, Any]:
        """Return the scale and counts for a resumed run."""
        return {"scale": self.scale, "growth": self.growth, "skipped": self.skipped, "overflowed": self.overflowed}

    def put_state(self, runtime: Runtime, state: dict[str, Any]) -> None:
        """Restore the scale and counts."""
        self.scale, self.growth = float(state["scale"]), int(state["growth"])
        self.skipped, self.overflowed = int(state["skipped"]), bool(state["overflowed"])

    def _refuse_unscaled(self, model: nn.Module, _: Any) -> None:
        if model.training and torch.is_grad_enabled() and not self._within:
            raise ConfigError(
                "mixed_precision='fp16' needs a scaled loss, which only hfscale.train_step computes: use loss = "
                "hfscale.train_step(model, batch), or mixed_precision='bf16' for loss.backward()"
            )
