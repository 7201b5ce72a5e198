"""Optimizer offload as a part: refuse optimizers that would keep their state on the device."""

from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ConfigError
from ...plan.offload import offloaded
from ...train.runtime import Part, Runtime
from ...train.runtime.local_weights import LocalWeights

_MARK = "_hfscale_steps_on_host"
_hooked: list[Any] = []


class OffloadOptimizer(Part):
    """A part that guards optimizer steps if the plan offloads the optimizer."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Mark the parameters. Installed after the parts that replace parameters."""
        if not offloaded(runtime.plan).optimizer:
            return
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_refuse_others))
        for parameter in runtime.model.parameters():
            setattr(parameter, _MARK, True)


def _refuse_others(optimizer: Any, *_: Any) -> None:
    """Refuse the step of an optimizer that is not offloaded; torch calls it before every optimizer's step."""
    if getattr(optimizer, "state_device", None) is not None:
        return
    held: list[nn.Parameter] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(getattr(parameter, _MARK, False) for parameter in held):
        raise ConfigError(
            f"the model was built with offload_optimizer=True, and {type(optimizer).__name__} would keep its state "
            "where the parameters are: make it by hfscale.create_optimizer(model, 'adamw_torch', lr=...)"
        )
