"""Start a group of processes on this machine to check or measure collectives; each process has its own device."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .._compat.torch_device import ACCELERATOR, accelerators, is_accelerator
from ..config.environment import local_rank, started_processes
from ..errors import HFScaleError


class MeasurementError(HFScaleError, RuntimeError):
    """Raised by :func:`run_ranks` if one of the processes that it starts fails."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 300.0,
) -> Any:
    """Run ``function(device, *args)`` in ``world`` processes that form a process group; return rank 0's result.

    Raise :class:`MeasurementError` if a rank fails or the run takes more than ``timeout`` seconds.
    """
    from ..testing.pool import RankError, RankPool  # imports transformers

    try:
        with RankPool(world, timeout, backend=_backend) as ranks:
            return ranks.run(_on_own_device, function, args)[0]
    except RankError as error:
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(dict.fromkeys((said[0], said[-1])))
        raise MeasurementError(
            f"{world} processes could not communicate: {reason}: remove this cause, or use fewer processes"
        ) from error


def _device() -> torch.device:
    rank = local_rank()
    world = started_processes()
    return (
        torch.device(ACCELERATOR, rank)
        if world <= accelerators().device_count()
        else torch.device("cpu")
    )


def _backend() -> str:
    if is_accelerator(_device()):
        accelerators().set_device(_device())
    return dist.get_default_backend_for_device(_device())


def _on_own_device(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(_device(), *args)
