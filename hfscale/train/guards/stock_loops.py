"""Raise errors when stock training loops, gradient clipping or optimizers are about to treat a rank's shards as the
full model.

Accelerate's ``Accelerator``, which ``transformers.Trainer`` and its subclasses use as well, treats every process as a
data rank. It would wrap the model again (DDP then overwrites one rank's shards with another rank's), give different
batches to ranks that need the same batch, and clip by the norm of each rank's shards, all without an error. Loops pass
the model to :meth:`accelerate.Accelerator.prepare` before their first step, so ``prepare`` raises an error for a
sharded model.

``torch.nn.utils.clip_grad_norm_`` reads only one rank's gradients. Tensor, pipeline and expert ranks hold different
gradients, so each rank would clip by a different norm. The same holds for ``get_total_norm``. (For FSDP2's shards,
torch computes the norm of the full model.) A ``torch.amp.GradScaler`` searches for overflows in the same gradients, so
one rank might skip a step that others take.

Most optimizers update each entry independently of the others, so each rank may step its shards. Some need full matrices
(Adafactor's row and column means, Muon's products, the norms of LARS and LAMB) or all parameters together (L-BFGS,
Prodigy): on shards, their updates would differ from those in one process, without an error. To find out which kind an
optimizer class is, a trial runs before its first step: a copy of the optimizer steps two small matrices, once full and
once sharded like a rank's matrices. DTensor computes with FSDP2's shards as if they were full; for them the copy steps
two small DTensors, because some classes use operations that DTensor lacks.

An assignment to ``parameter.data`` replaces the values of an ordinary parameter, but changes nothing in a DTensor, so
for FSDP2's shards it raises an error.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import accelerate
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..._compat.lasting import check_assigned, check_every_step, check_first
from ..._compat.peft import functions_that_adapt
from ..._compat.torch_device import fork_random_state
from ..._compat.transformers.classes import class_name
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...plan import ParameterPlan
from ...plan.feature_plans import offloaded
from ...plan.quantized import flat_blocks_align
from ..runtime import Runtime, find_runtime
from ..runtime.handover import follow
from ..runtime.shards import local_tensor

_MARK = "_hfscale_parts"
_TOLERANCE = 1e-3
_INSTEAD = (
    "the optimizer by hfscale.create_optimizer(model, name, lr=...), which has 'adafactor' and 'muon' over shards, or "
    "use one like AdamW, SGD or Lion"
)
# _judged maps each checked optimizer to its number of groups at the check.
# _inner holds inner optimizers of hfscale, which step the tensors that an outer optimizer passes to them.
_inner: "WeakSet[torch.optim.Optimizer]" = WeakSet()
_judged: "WeakKeyDictionary[torch.optim.Optimizer, int]" = WeakKeyDictionary()
_trying: list[None] = []  # not empty during a trial step, which is not checked itself
_spread_models: "WeakSet[nn.Module]" = WeakSet()
_NORMS = {
    "clip_grad_norm_": "would clip each rank of {} by the norm of its own shards, and ranks would drift apart: use "
    "hfscale.clip_grad_norm_(model, max_norm), which returns the norm of the whole model on every rank",
    "get_total_norm": "would return, on each rank of {}, the norm of that rank's shards: "
    'hfscale.clip_grad_norm_(model, float("inf")) returns the norm of the whole model and clips nothing',
}


def refuse_stock_accelerator() -> None:
    """Make Accelerate's ``Accelerator`` raise an error when it is given a sharded model. Subclasses that set
    ``serves_hfscale = True`` are not affected.
    """
    for name in ("prepare", "prepare_model"):
        check_first(accelerate.Accelerator, name, _check_models)


def refuse_stock_adapters() -> None:
    """Make PEFT's functions that add adapters raise an error for sharded models, since they would treat a rank's shards
    as the full model. Do nothing if PEFT is not installed.
    """
    for holder, name in functions_that_adapt():
        check_first(holder, name, _check_adapted)


def refuse_stock_clipping(runtime: Runtime) -> None:
    """Make ``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and ``GradScaler`` raise an error for this model's
    parameters, if its tensor, pipeline or expert ranks would compute different norms.

    If a script has imported such a function by name earlier, it is not affected, but :mod:`.replicas` detects the
    result.
    """
    if not _norms_differ(runtime.mesh):
        return
    _spread_models.add(runtime.model)
    for name in _NORMS:
        check_first(torch.nn.utils, name, functools.partial(_check_tensors, name))
    for name in ("unscale_", "step"):
        check_first(torch.amp.GradScaler, name, _check_scaler)


def _check_adapted(
    wrapper: Any,
    model: Any,
    *args: Any,
    **_: Any,
) -> tuple[Any, ...]:
    runtime = find_runtime(model)
    if runtime is not None and not runtime.is_alone:
        raise ConfigError(
            f"{class_name(runtime.model)} is spread over {runtime.mesh.layout.describe()}, and PEFT's own "
            f"{type(wrapper).__name__} would treat this rank's shards as the full model: call "
            "hfscale.get_peft_model(model, config), which takes LoRA, IA3 and LoHa, or use one process"
        )
    return (wrapper, model, *args)


def _check_models(accelerator: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    for given in () if getattr(accelerator, "serves_hfscale", False) else (*args, *kwargs.values()):
        runtime = find_runtime(given)
        if runtime is not None and not runtime.is_alone:
            raise ConfigError(
                f"{class_name(runtime.model)} is spread over {runtime.mesh.layout.describe()} by hfscale, and "
                "accelerate.Accelerator - the one inside transformers.Trainer and its subclasses too - treats every "
                "process as a data rank: it would wrap the model again, give different batches to ranks that need the "
                "same batch, and clip each rank's gradients by the norm of that rank's shards. In place of "
                "accelerate.Accelerator use hfscale.Accelerator; in place of transformers.Trainer use "
                "hfscale.Trainer, or class MyTrainer(hfscale.TrainerMixin, ...) for a subclass; or write a loop: loss "
                "= hfscale.train_step(model, batch); hfscale.clip_grad_norm_(model, 1.0); optimizer.step(). One "
                "process may use Trainer as it is"
            )
    return accelerator, *args


def _check_tensors(
    name: str,
    tensors: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Raise :class:`ConfigError` if the given parameters, or gradients, belong to a model whose ranks would compute
    different norms of them. ``name`` is torch's function that was called.
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    parts = {
        id(p.grad): p for model in _spread_models for p in model.parameters() if p.grad is not None
    }
    spread = _spread_of(
        [
            *given,
            *(parts[id(tensor)] for tensor in given if id(tensor) in parts),
        ]
    )
    if spread is not None:
        raise ConfigError(f"torch.nn.utils.{name} {_NORMS[name].format(spread)}")
    return given, *args


def _spread_of(parameters: Iterable[Tensor]) -> str | None:
    """Return the text of a model's layout if one of the parameters belongs to a model whose ranks would compute
    different gradient norms; otherwise return ``None``.
    """
    held = (getattr(parameter, _MARK) for parameter in parameters if hasattr(parameter, _MARK))
    return next((part.layout for part in held if _norms_differ(part.mesh)), None)


def _norms_differ(mesh: Mesh) -> bool:
    return max(mesh.layout.tp, mesh.layout.pp, mesh.layout.ep) > 1


def _check_scaler(
    scaler: Any,
    optimizer: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    spread = _spread_of(
        parameter for group in optimizer.param_groups for parameter in group["params"]
    )
    if spread is not None and scaler.is_enabled():
        raise ConfigError(
            f"torch.amp.GradScaler would search only this rank's shards for overflows, so ranks of {spread} would skip "
            'different steps: load the model with mixed_precision="fp16", which uses one scale and one decision for '
            "all ranks, and leave the scaler out"
        )
    return scaler, optimizer, *args


class _Held(NamedTuple):
    """Describe a parameter of a parallelized model for the checks of an optimizer that holds it."""

    mesh: Mesh
    layout: str  # the layout, in words
    planned: ParameterPlan
    on_host: bool  # whether it is stepped on the CPU

    @property
    def staged(self) -> bool:
        """Return whether other pipeline stages have other parameters."""
        return self.mesh.layout.pp > 1


def refuse_other_optimizers(runtime: Runtime) -> None:
    """Make optimizers check the model's parameters at their first step. They raise an error if their updates on shards
    would differ from those in one process, if they fail on shards, or if they would keep the state on the GPU although
    the model offloads it.
    """
    layout = runtime.mesh.layout
    on_host = offloaded(runtime.plan).optimizer
    _judged.clear()  # forget earlier results, because their parameters may have been replaced
    check_every_step(_check)
    if runtime.is_alone and not on_host:
        return
    if runtime.mesh.data_world > 1:
        from .apart import watch_for_others

        watch_for_others(runtime)
        check_assigned(DTensor, "data", _check_data)
    for planned, parameter in runtime.parameters():
        setattr(parameter, _MARK, _Held(runtime.mesh, layout.describe(), planned, on_host))


def _check_data(parameter: Any, value: Any) -> None:
    """Raise :class:`ConfigError` if other values are assigned to the ``data`` of a model's FSDP2 shard: torch would
    keep the shard's old values, without an error. Averaged weights are often put into a model in this way.
    """
    part = getattr(parameter, _MARK, None)
    if part is None:
        return
    own, given = (local_tensor(each.detach()) for each in (parameter, value))
    # Casts are assigned too; what FSDP2 does with another dtype is checked before a pass.
    if own.dtype == given.dtype and own.data_ptr() != given.data_ptr():
        raise ConfigError(
            f"parameter.data = value does nothing to {part.planned.name}, which FSDP2 shards over {part.layout}, so "
            "the model would keep its weights: copy the values, with torch.no_grad(): parameter.copy_(value)"
        )


def leave_to_outer(optimizer: torch.optim.Optimizer) -> None:
    """Exclude an optimizer from the checks, because another optimizer uses it inside to step its tensors, and that one
    is checked.
    """
    _inner.add(optimizer)


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Check an optimizer's parameters before its first step, and again if its number of parameter groups has changed.
    Torch calls this function before every step of any optimizer.
    """
    if _trying or optimizer in _inner or _judged.get(optimizer) == len(optimizer.param_groups):
        return
    follow(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = [getattr(parameter, _MARK) for parameter in held if hasattr(parameter, _MARK)]
    if getattr(optimizer, "state_device", None) is None and any(part.on_host for part in parts):
        raise ConfigError(
            f"the model was built with offload_optimizer=True, but {type(optimizer).__name__} would keep its state on "
            "the device of the parameters, not on the host: make the optimizer by hfscale.create_optimizer(model, "
            "'adamw_torch', lr=...)"
        )
    # Hfscale's own optimizers handle sharded parameters correctly.
    if not getattr(optimizer, "keeps_plain_state", False):
        _check_stock(optimizer, held, parts)
    if beside := [each for each in held if not hasattr(each, _MARK) and each.requires_grad]:
        from .apart import refuse_alone, refuse_beside

        if not parts:
            refuse_alone(optimizer, beside)
        elif not parts[0].staged:
            refuse_beside(optimizer, beside, parts[0].mesh, parts[0].layout)
    _judged[optimizer] = len(optimizer.param_groups)


def _check_stock(
    optimizer: torch.optim.Optimizer, held: Sequence[Tensor], parts: Sequence[_Held]
) -> None:
    """Raise :class:`ConfigError` if the updates of an optimizer that is not one of hfscale's classes would differ on
    shards from those on full parameters, or fail; warn if they would differ only by rounding.
    """
    cut = next((part for part in parts if part.planned.model_cuts), None)
    if cut is not None and _differs(optimizer, held[0].device, halved=True):
        _refuse(optimizer, cut, f"{cut.planned.name} is cut")
    elif parts and parts[0].staged and _differs(optimizer, held[0].device, halved=False):
        _refuse(optimizer, parts[0], "stages hold some parameters each")
    _refuse_over_shards(optimizer, held)
    _warn_of_other_blocks(optimizer)


def _warn_of_other_blocks(optimizer: torch.optim.Optimizer) -> None:
    """Warn if bitsandbytes' 8-bit optimizer states are rounded differently on shards than on full parameters: because
    blocks with a common scale do not align with the shards, or because a shard is so small that its state is kept in 32
    bits.
    """
    if "bitsandbytes" not in sys.modules:
        return
    from ..._compat.bitsandbytes import parameters_in_8_bits
    from ...cost.model.optimizer_bytes import BLOCK

    apart: list[_Held] = []
    for parameter, enough in parameters_in_8_bits(optimizer):
        part: _Held | None = getattr(parameter, _MARK, None)
        if part is not None and part.planned.model_cuts and part.planned.numel >= enough:
            whole = flat_blocks_align(part.planned, BLOCK) and parameter.numel() >= enough
            apart += [] if whole else [part]
    if apart and apart[0].mesh.is_first:
        warnings.warn(
            f"{type(optimizer).__name__} keeps states in 8 bits, with a scale for each {BLOCK} entries of a shard: "
            f"over {apart[0].layout}, shards of {len(apart)} parameters (for example {apart[0].planned.name}) are not "
            "whole blocks, so its steps differ from the steps of one process by rounding. "
            "hfscale.create_optimizer(model, 'adamw_8bit', lr=...) takes the same steps as one process",
            stacklevel=2,
        )


def _refuse_over_shards(optimizer: torch.optim.Optimizer, held: Sequence[Tensor]) -> None:
    sharded = next(
        (
            parameter
            for parameter in held
            if hasattr(parameter, _MARK) and isinstance(parameter, DTensor)
        ),
        None,
    )
    if sharded is not None and (error := _fails_on_shards(optimizer, sharded, held)):
        raise ConfigError(
            f"{type(optimizer).__name__} cannot step parameters that FSDP2 shards over "
            f"{getattr(sharded, _MARK).layout} ({error}): make {_INSTEAD}"
        )


def _refuse(optimizer: torch.optim.Optimizer, part: _Held, why: str) -> None:
    raise ConfigError(
        f"{type(optimizer).__name__} is not elementwise (a trial on two small matrices, full and sharded, gave "
        f"different steps), and over {part.layout} {why}: its steps would differ from the steps of one process: make "
        f"{_INSTEAD}"
    )


def _fails_on_shards(
    optimizer: torch.optim.Optimizer, sharded: DTensor, held: Sequence[Tensor]
) -> str:
    """Return the error of a trial step of the optimizer's class on small DTensors, which are sharded like the parameter
    ``sharded``. Return ``""`` if the step works, or if the class fails on plain tensors, too. Collective.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it concatenates all parameters into one vector"
    kinds = {parameter.ndim for parameter in held if isinstance(parameter, DTensor)}
    start = [torch.ones((4,) * dims) for dims in sorted(kinds)]

    def shard(local: Tensor) -> Tensor:
        return DTensor.from_local(local, sharded.device_mesh, sharded.placements, run_check=False)

    try:
        _stepped(optimizer, start, [start, start], sharded.device)
    except Exception:  # a class may raise anything in a trial that it was not made for
        return ""
    try:
        _stepped(optimizer, start, [start, start], sharded.device, shard)
    except Exception as error:  # of any type: DTensor's errors for missing operations
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return ""


def _differs(optimizer: torch.optim.Optimizer, device: torch.device, halved: bool) -> bool:
    """Return whether an optimizer's update of a matrix depends on entries that a rank may lack. In a trial, a copy of
    the optimizer steps two matrices, first full, and then without half of the first matrix (``halved``), or without the
    first matrix; the updates are compared. If the trial fails, return ``True`` only for L-BFGS.
    """
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-1, 1, 8)[:, None]  # so that the two halves have different norms
    start = [torch.randn(8, 8, generator=generator) * scale for _ in range(2)]
    gradients = [[torch.randn(8, 8, generator=generator) * scale for _ in start] for _ in range(3)]

    def of_rank(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0][:4], tensors[1]] if halved else tensors[1:]

    part = of_rank(start)
    try:
        with fork_random_state(device):
            whole, again = (_stepped(optimizer, start, gradients, device) for _ in range(2))
            stepped = _stepped(optimizer, part, list(map(of_rank, gradients)), device)
    except Exception:  # a class may raise anything in a trial that it was not made for
        return isinstance(optimizer, torch.optim.LBFGS)
    if any(not torch.equal(one, other) for one, other in zip(whole, again, strict=True)):
        return False
    return any(
        float((one - other).abs().max()) > _TOLERANCE * float((one - before).abs().max())
        for one, other, before in zip(of_rank(whole), stepped, part, strict=True)
    )


def _stepped(
    optimizer: torch.optim.Optimizer,
    start: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    device: torch.device,
    shard: Callable[[Tensor], Tensor] = lambda plain: plain,
) -> list[Tensor]:
    """Step copies of the tensors ``start`` with each entry of ``gradients`` (one gradient per tensor), by a new
    optimizer of the same class and options, and return the results. ``shard`` converts tensors to shards first.
    """
    asked = inspect.signature(type(optimizer)).parameters
    options = {
        name: value
        for name, value in optimizer.defaults.items()
        if name in asked and name != "params"
    }
    wanted = inspect.signature(type(optimizer).step).parameters.get("closure")
    closure = (
        [lambda: 0.0] if wanted is not None and wanted.default is inspect.Parameter.empty else []
    )
    parameters = [nn.Parameter(shard(tensor.clone().to(device))) for tensor in start]
    _trying.append(None)
    try:
        other = type(optimizer)(parameters, **options)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = shard(gradient.clone().to(device))
            other.step(*closure)
    finally:
        _trying.pop()
    return [parameter.detach().cpu() for parameter in parameters]
