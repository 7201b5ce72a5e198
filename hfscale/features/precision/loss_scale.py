"""Loss scaling with one scale and one decision to skip a step for all ranks (Micikevicius et al. 2018).

In float16, gradients of activations below 6e-8 are zero, so the loss is multiplied before its backward pass, and
gradients, which are in 32 bits, are divided after it. Data flow of a training step::

    loss x scale -> backward passes, sums over ranks -> gradients / scale -> any infinite, on any rank?
      no    .grad is unscaled; after `growth_interval` such steps the scale grows
      yes   .grad is None everywhere, so any optimizer leaves everything as it is; the scale shrinks

The arithmetic is that of ``torch.amp.GradScaler``, which decides for the gradients of one process. FSDP2 averages the
gradients it reduces; the loss is divided by the number of data ranks, so that activations get the gradients of one
process.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..._compat.torch import unscale_and_check
from ...errors import ConfigError
from ...train.runtime import Part, Runtime, local_tensor
from ...train.runtime.shards import LocalWeights, add_back, gradients_aside


class LossScaling(Part):
    """Scale the loss under ``mixed_precision="fp16"`` by ``scale``, unchanged for the last ``growth`` steps, which did
    not overflow. So far ``skipped`` steps were skipped; ``overflowed`` says whether the last one was.
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
        self._update(runtime)

    def _expect(self, runtime: Runtime, scale: float | None) -> None:
        """Set the gradient with which backward passes begin; ``None`` outside of a step."""
        self._within = scale is not None
        if runtime.loss is not None:  # a user's loss computes no gradients in the forward pass
            runtime.loss.expected_gradient = 1.0 if scale is None else scale

    def _update(self, runtime: Runtime) -> None:
        how = runtime.options.scaling
        if self.overflowed:
            self.scale, self.growth, self.skipped = self.scale * how.backoff_factor, 0, self.skipped + 1
            return
        self.growth += 1
        if self.growth == how.growth_interval:
            grown = self.scale * how.growth_factor
            self.scale, self.growth = grown if math.isfinite(grown) else self.scale, 0

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
