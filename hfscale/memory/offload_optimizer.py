"""Offload of the optimizer as a part: a run that asked for it is not stepped by an optimizer that does not do it."""

from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigError
from ..plan.offload import offloaded
from ..runtime import Part, Runtime
from ..runtime.local_weights import LocalWeights

_MARK = "_hfscale_steps_on_host"
_hooked: list[Any] = []


class OffloadOptimizer(Part):
    """Nothing where it was not asked for."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Mark the parameters. Comes behind what makes the final ones."""
        if not offloaded(runtime.plan).optimizer:
            return
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_refuse_others))
        for parameter in runtime.model.parameters():
            setattr(parameter, _MARK, True)


def _refuse_others(optimizer: Any, *_: Any) -> None:
    """Called before any optimizer's step."""
    if getattr(optimizer, "state_device", None) is not None:
        return
    held: list[nn.Parameter] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(getattr(parameter, _MARK, False) for parameter in held):
        raise ConfigError(
            f"the model was built with offload_optimizer=True, and {type(optimizer).__name__} would keep its state "
            "where the parameters are: make it by hfscale.create_optimizer(model, 'adamw_torch', lr=...)"
        )
