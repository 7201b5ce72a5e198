"""Optimizers of any class, over parameters of which ranks hold parts.

Most optimizers treat entries one by one, and each rank may step its own. Some look at whole matrices (Adafactor's means
of rows and columns, Muon's products, the norms of LARS and LAMB) or at all parameters together (L-BFGS, Prodigy): over
parts they take other steps than one process, and nothing raises. Which of the two a class is, is found by trial, before
its first step: a copy of the optimizer steps two small matrices whole, and as a rank would hold them. Over FSDP2's
shards, with which torch computes as if they were whole, the copy steps two small sharded tensors: some classes use
operations that DTensor does not have.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._host.torch_device import fork_random_state
from ..errors import ConfigError
from ..runtime import Runtime

_PARTS = "_hfscale_parts"
_TOLERANCE = 1e-3
_INSTEAD = (
    "the optimizer by hfscale.create_optimizer(model, name, lr=...), which has 'adafactor' and 'muon' over shards, or "
    "use one like AdamW, SGD or Lion"
)
_judged: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
_hooked: list[Any] = []
_trying: list[None] = []  # not empty while a trial steps, which is not judged itself


def refuse_whole_tensor_optimizers(runtime: Runtime) -> None:
    """From now on, an optimizer's first step over this model's parameters is refused if it would not be that of one
    process, or cannot be made over FSDP2's shards: :class:`ConfigError`.
    """
    layout = runtime.mesh.layout
    for planned, parameter in runtime.parameters():
        cut = any(cut.axis in ("tp", "ep") for cut in planned.cuts)
        setattr(parameter, _PARTS, (layout.describe(), planned.name, cut, layout.size("pp") > 1))
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Called before any optimizer's step."""
    if _trying or optimizer in _judged:
        return
    _judged.add(optimizer)
    if getattr(optimizer, "keeps_plain_state", False):  # of hfscale's own, which know what is cut
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = [getattr(parameter, _PARTS) for parameter in held if hasattr(parameter, _PARTS)]
    cut = next((part for part in parts if part[2]), None)
    if cut is not None and _differs(optimizer, held[0].device, halved=True):
        _refuse(optimizer, cut, f"{cut[1]} is cut")
    elif parts and parts[0][3] and _differs(optimizer, held[0].device, halved=False):
        _refuse(optimizer, parts[0], "stages hold some parameters each")
    _refuse_over_shards(optimizer, held)


def _refuse_over_shards(optimizer: torch.optim.Optimizer, held: Sequence[Tensor]) -> None:
    sharded = next((each for each in held if hasattr(each, _PARTS) and isinstance(each, DTensor)), None)
    if sharded is not None and (error := _fails_on_shards(optimizer, sharded, held)):
        _judged.discard(optimizer)
        raise ConfigError(
            f"{type(optimizer).__name__} cannot step parameters that FSDP2 shards over {getattr(sharded, _PARTS)[0]} "
            f"({error}): make {_INSTEAD}"
        )


def _refuse(optimizer: torch.optim.Optimizer, part: tuple[str, str, bool, bool], why: str) -> None:
    name = type(optimizer).__name__
    _judged.discard(optimizer)
    raise ConfigError(
        f"{name} does not treat entries one by one (tried on two small matrices, whole and in parts), and over "
        f"{part[0]} {why}: ranks would take other steps than one process. Make {_INSTEAD}"
    )


def _fails_on_shards(optimizer: torch.optim.Optimizer, sharded: DTensor, held: Sequence[Tensor]) -> str:
    """Return the error of a step over small tensors that are sharded like ``sharded``, with as many dims as those
    ``held``; empty where there is none, and where a step over plain tensors fails too. All ranks call it, as the step.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it puts all of them into one vector"
    start = [torch.ones((4,) * dims) for dims in sorted({parameter.ndim for parameter in held})]

    def shard(local: Tensor) -> Tensor:
        return DTensor.from_local(local, sharded.device_mesh, sharded.placements, run_check=False)

    try:
        _stepped(optimizer, start, [start, start], sharded.device)
    except Exception:  # whatever a class says of a trial that it was not made for
        return ""
    try:
        _stepped(optimizer, start, [start, start], sharded.device, shard)
    except Exception as error:  # of any kind: DTensor's, for what it cannot do
        return f"{type(error).__name__}: {error}".splitlines()[0][:100]
    return ""


def _differs(optimizer: torch.optim.Optimizer, device: torch.device, halved: bool) -> bool:
    """Whether steps of a rank that holds half of one matrix (or nothing of it) are not those of one process.

    ``False`` where that cannot be tried: a class that wants more than its options, or that draws at random.
    """
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-1, 1, 8)[:, None]  # so that halves have norms of their own
    start = [torch.randn(8, 8, generator=generator) * scale for _ in range(2)]
    gradients = [[torch.randn(8, 8, generator=generator) * scale for _ in start] for _ in range(3)]
    part = [start[0][:4], start[1]] if halved else start[1:]
    given = [[each[0][:4], each[1]] if halved else each[1:] for each in gradients]
    try:
        with fork_random_state(device):
            whole, again = (_stepped(optimizer, start, gradients, device) for _ in range(2))
            found = _stepped(optimizer, part, given, device)
    except Exception:  # whatever a class says of a trial that it was not made for
        return isinstance(optimizer, torch.optim.LBFGS)
    if any(not torch.equal(one, other) for one, other in zip(whole, again, strict=True)):
        return False
    expected = [whole[0][:4], whole[1]] if halved else whole[1:]
    return any(
        float((one - other).abs().max()) > _TOLERANCE * float((one - before).abs().max())
        for one, other, before in zip(expected, found, part, strict=True)
    )


def _stepped(
    optimizer: torch.optim.Optimizer,
    start: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    device: torch.device,
    shard: Callable[[Tensor], Tensor] = lambda plain: plain,
) -> list[Tensor]:
    """Where another optimizer of the same class and options takes parameters that begin at ``start``."""
    asked = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in asked and name != "params"}
    wanted = inspect.signature(type(optimizer).step).parameters.get("closure")
    closure = [lambda: 0.0] if wanted is not None and wanted.default is inspect.Parameter.empty else []
    parameters = [nn.Parameter(shard(each.clone().to(device))) for each in start]
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
