"""Accelerate's own ``Accelerator``, which ``transformers.Trainer`` and its subclasses use too, and models of hfscale's.

It counts every process as a distinct batch. Given a model that several ranks hold together it would wrap it a second
time (DDP then overwrites one rank's shares with another's), deal ranks that share a batch different ones, and clip the
part of a norm that each rank sees; nothing of that raises. What all these loops must do before their first step is to
hand the model to :meth:`accelerate.Accelerator.prepare`, so that is where the model is refused.
"""

import functools
from collections.abc import Callable
from typing import Any

import accelerate
from torch import nn

from ..errors import ConfigError
from ..runtime import find_runtime

_MARK = "_hfscale_refuses"


def refuse_stock_accelerator() -> None:
    """From now on, Accelerate's own ``Accelerator`` refuses models that hfscale has spread over several ranks.

    Its subclasses that know hfscale's models say so: ``serves_hfscale = True``.
    """
    kind: Any = accelerate.Accelerator
    for name in ("prepare", "prepare_model"):
        if not hasattr(getattr(kind, name), _MARK):
            setattr(kind, name, _refusing(getattr(kind, name)))


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "serves_hfscale", False):
            for model in (given for given in (*args, *kwargs.values()) if isinstance(given, nn.Module)):
                _refuse(model)
        return method(self, *args, **kwargs)

    setattr(checked, _MARK, True)
    return checked


def _refuse(model: nn.Module) -> None:
    runtime = find_runtime(model)
    if runtime is None or runtime.mesh.layout.total_size == 1:
        return
    raise ConfigError(
        f"{type(runtime.model).__name__} is spread over {runtime.mesh.layout.describe()} by hfscale, and "
        "accelerate.Accelerator - the one inside transformers.Trainer and its subclasses too - takes every process "
        "for a data-parallel one: it would wrap the model again, deal ranks that share a batch different ones and "
        "clip a part of the norm on each. In place of accelerate.Accelerator use hfscale.Accelerator; in place of a "
        "Trainer, a loop: loss = hfscale.train_step(model, batch); hfscale.clip_grad_norm_(model, 1.0); "
        "optimizer.step(), over hfscale.Accelerator().prepare(model, optimizer, loader, scheduler). One process may "
        "use Trainer as it is"
    )
