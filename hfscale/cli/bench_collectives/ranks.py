"""Start ranks on this machine for a measurement: one per GPU over NCCL, or processes over gloo."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ..._compat.torch_device import ACCELERATOR, accelerators, is_accelerator
from ...errors import HFScaleError


class MeasurementError(HFScaleError, RuntimeError):
    """Raised if a rank that was started for a measurement failed."""


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> Any:
    """Run ``function(device, *args)``, defined at the top of a module, on ``world`` processes in one process group;
    return rank 0's result, for which ``timeout`` seconds are waited.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="hfscale_ranks_") as directory:
        ranks = [
            context.Process(target=_rank, args=(rank, world, directory, sending, function, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        sending.close()
        try:
            answered = receiving.poll(timeout)
            kind, value = receiving.recv() if answered else ("failed", f"no answer within {timeout:.0f} s")
        except EOFError:
            kind, value = "failed", "all ranks ended without an answer"
        finally:
            for process in ranks:
                process.join(10)
                process.kill()
                process.join()
            receiving.close()
    if kind == "failed":
        raise MeasurementError(f"{world} processes could not communicate: {value}")
    return value


def _rank(
    rank: int, world: int, directory: str, answers: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    gpus = accelerators().device_count()
    device = torch.device(ACCELERATOR, rank) if world <= gpus else torch.device("cpu")
    if is_accelerator(device):
        accelerators().set_device(device)
    store = f"file://{os.path.join(directory, 'store')}"
    try:
        dist.init_process_group(dist.get_default_backend_for_device(device), store, rank=rank, world_size=world)
        value = function(device, *args)
        if rank == 0:
            answers.send(("found", value))
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors of communication are RuntimeErrors
        answers.send(("failed", f"rank {rank}: {error}"))
