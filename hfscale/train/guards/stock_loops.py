"""Refuse stock training loops for parallelized models: Accelerate's ``Accelerator``, which ``transformers.Trainer`` and
its subclasses use too, and torch's clipping.

The ``Accelerator`` treats every process as a data rank. It would wrap the model again (DDP then overwrites one rank's
shards with another's), give different batches to ranks that must share one, and clip by the norm of each rank's shards;
none of that raises. All these loops must pass the model to :meth:`accelerate.Accelerator.prepare` before their first
step, so the model is refused there.

``torch.nn.utils.clip_grad_norm_`` sees the gradients of one rank. If ranks hold different ones (tensor, pipeline and
expert ranks do; of FSDP2's shards torch knows the full norm) each would clip by another norm, and ``get_total_norm``
return one. A ``torch.amp.GradScaler`` looks for overflows in the same gradients: one rank would skip a step that others
take.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import accelerate
import torch
from torch import Tensor, nn

from ..._compat.transformers.classes import class_name
from ...errors import ConfigError
from ..runtime import Runtime, find_runtime

_MARK = "_hfscale_refuses"
_SPREAD = "_hfscale_spread"
_spread_models: "WeakSet[nn.Module]" = WeakSet()


def refuse_stock_accelerator() -> None:
    """Patch Accelerate's ``Accelerator`` to refuse models that hfscale has sharded over several ranks.

    Its subclasses that support hfscale's models set ``serves_hfscale = True``.
    """
    for name in ("prepare", "prepare_model"):
        _check_first(accelerate.Accelerator, name, _check_models)


def refuse_stock_clipping(runtime: Runtime) -> None:
    """Patch ``torch.nn.utils.clip_grad_norm_`` and ``GradScaler`` to refuse this model's parameters if its ranks see
    different norms.

    If a script imported the function by name before, :mod:`.replicas` detects the result.
    """
    layout = runtime.mesh.layout
    if max(layout.tp, layout.pp, layout.ep) == 1:
        return
    for _, parameter in runtime.parameters():
        setattr(parameter, _SPREAD, layout.describe())
    _spread_models.add(runtime.model)
    _check_first(torch.nn.utils, "clip_grad_norm_", _check_parameters)
    _check_first(torch.nn.utils, "get_total_norm", _check_gradients)
    for name in ("unscale_", "step"):
        _check_first(torch.amp.GradScaler, name, _check_scaler)


def _check_first(holder: Any, name: str, check: Callable[..., tuple[Any, ...]]) -> None:
    """Patch the function ``name`` of ``holder`` to run on the positional arguments that ``check`` returns."""
    function = getattr(holder, name)
    if hasattr(function, _MARK):
        return

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return function(*check(*args, **kwargs), **kwargs)

    setattr(checked, _MARK, True)
    setattr(holder, name, checked)


def _check_models(accelerator: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    if not getattr(accelerator, "serves_hfscale", False):
        for model in (given for given in (*args, *kwargs.values()) if isinstance(given, nn.Module)):
            _refuse(model)
    return accelerator, *args


def _check_parameters(parameters: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    spread = _spread_of(given)
    if spread is not None:
        raise ConfigError(
            f"torch.nn.utils.clip_grad_norm_ would clip, on each rank of {spread}, by the norm of what that rank "
            "holds, and ranks would drift apart: use hfscale.clip_grad_norm_(model, max_norm), which returns the "
            "norm of the whole model on every rank"
        )
    return given, *args


def _check_gradients(tensors: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    parts = {id(p.grad): p for model in _spread_models for p in model.parameters() if p.grad is not None}
    spread = _spread_of([*given, *(parts[id(each)] for each in given if id(each) in parts)])
    if spread is not None:
        raise ConfigError(
            f"torch.nn.utils.get_total_norm would return, on each rank of {spread}, the norm of what that rank holds: "
            'hfscale.clip_grad_norm_(model, float("inf")) returns the norm of the whole model and clips nothing'
        )
    return given, *args


def _spread_of(parameters: Iterable[Tensor]) -> str | None:
    """Return the layout of the first parameter of a model whose ranks see different norms, or ``None``."""
    return next((getattr(each, _SPREAD) for each in parameters if hasattr(each, _SPREAD)), None)


def _check_scaler(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    spread = _spread_of(parameter for group in optimizer.param_groups for parameter in group["params"])
    if spread is not None and scaler.is_enabled():
        raise ConfigError(
            f"torch.amp.GradScaler would look for overflows, on each rank of {spread}, in what that rank holds, and "
            'one would skip a step that others take: load the model with mixed_precision="fp16", whose one scale and '
            "one decision are for all ranks, and leave the scaler out"
        )
    return scaler, optimizer, *args


def _refuse(model: nn.Module) -> None:
    runtime = find_runtime(model)
    if runtime is None or runtime.mesh.layout.total_size == 1:
        return
    raise ConfigError(
        f"{class_name(runtime.model)} is spread over {runtime.mesh.layout.describe()} by hfscale, and "
        "accelerate.Accelerator - the one inside transformers.Trainer and its subclasses too - takes every process "
        "for a data-parallel one: it would wrap the model again, deal ranks that share a batch different ones and "
        "clip a part of the norm on each. In place of accelerate.Accelerator use hfscale.Accelerator; in place of "
        "transformers.Trainer use hfscale.Trainer, or class MyTrainer(hfscale.TrainerMixin, ...) for a subclass; or "
        "write a loop: loss = hfscale.train_step(model, batch); hfscale.clip_grad_norm_(model, 1.0); "
        "optimizer.step(). One process may use Trainer as it is"
    )
