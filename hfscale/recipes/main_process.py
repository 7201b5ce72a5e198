"""Coordinate the processes of a run: run code on the main process while the others wait, gather values, and print an
error that several ranks raise only once.
"""

import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hfscale import CheckpointError, HFScaleError

from .._compat.torch_device import memory_in_use
from ..distributed.failures import explained, tell_others
from .schema import RecipeError

T = TypeVar("T")

_HEAD_START_SECONDS = 5.0
_SPREAD = 10  # number of ranks that wait for different times before they print their error
# EIO, ENOMEM, EFBIG, ENOSPC, EDQUOT, also in torch's messages: a later attempt may have enough memory or disk
_OF_THE_MACHINE = re.compile(r"\[Errno (5|12|27|28|122)\]|inline_container|unable to mmap")


def rank() -> int:
    """Return this process's index among those that the launcher started."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Return whether this is the main process, which reads the source, writes files and prints."""
    return rank() == 0


def on_main(work: Callable[[], None]) -> None:
    """Call ``work`` on the main process while the other processes wait. If it raises :class:`RecipeError`, raise this
    error on all processes.
    """
    failure: list[str | None] = [None]
    if is_main():
        try:
            work()
        except RecipeError as error:
            failure[0] = str(error)
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0]:
        raise RecipeError(failure[0])


def gathered(value: T) -> list[T]:
    """All-gather a picklable object: return the ``value`` of every process, by rank."""
    every = [value]
    if dist.is_initialized():
        every *= dist.get_world_size()
        dist.all_gather_object(every, value)
    return every


def peak_memory() -> int:
    """Return the peak memory, in bytes, of the process that needed most: GPU memory, or resident memory without a GPU.
    Call it on every rank.
    """
    used, _ = memory_in_use()
    return max(gathered(used))


def run(main: Callable[[], None]) -> None:
    """Call ``main``. If it raises, print the error and end this process; errors of hfscale are printed without a
    traceback.

    Several ranks often fail with the same error, which should be printed once. So the first failed rank prints at once,
    and other ranks wait before they print; meanwhile the launcher ends them. Before ranks are connected, rank 0 counts
    as the first.
    """
    try:
        main()
    except Exception as error:  # of any type: uncaught errors would print a traceback on every rank
        memory = explained(error)
        first = tell_others(error)
        broke = (
            isinstance(error, CheckpointError) and _OF_THE_MACHINE.search(str(error)) is not None
        )
        if not broke and not (is_main() if first is None else first):
            time.sleep(_HEAD_START_SECONDS + min(rank(), _SPREAD) / 2)
        if not isinstance(error, HFScaleError):
            traceback.print_exception(error)
        print(f"\nerror (rank {rank()}): {error}\n{memory}", file=sys.stderr, flush=True)
        # The launcher repeats the recorded error below its own traceback.
        get_error_handler().record_exception(error)
        # Not sys.exit: its clean-up may wait forever for ranks that have ended.
        os._exit(2 if isinstance(error, HFScaleError) and not broke else 1)
    if dist.is_initialized():
        dist.destroy_process_group()
