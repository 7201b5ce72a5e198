"""Saves that go on behind the steps: one at a time, by a thread with a group of ranks of its own.

A step waits for the copy to the host's memory alone. The next save waits for the one before it, and so does the end of
the process; an error of one is raised there, on every rank.
"""

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from .._host.torch_device import device_module, is_accelerator
from ..errors import CheckpointError, in_words
from ..mesh import Mesh
from ..processes import host_group
from ..runtime.writing import saving


class _Save(threading.Thread):
    """Not a daemon, so the process does not end before it."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=f"hfscale-save {name}", daemon=False)
        self.target, self.work = name, work
        self.error: BaseException | None = None

    @saving()
    def run(self) -> None:
        """Save; an error is kept for who asks, and said for the case that nobody will."""
        try:
            self.work()
        except BaseException as error:  # or whoever waits would take the save for done
            self.error = error
            told = in_words(error)
            print(f"hfscale: the save of {self.target} behind the steps failed: {told}", file=sys.stderr, flush=True)


_running: list[_Save] = []


def begin_save(name: str, work: Callable[[], None]) -> None:
    """Run ``work`` behind what comes next, once the save before it is done."""
    wait_for_saves()
    save = _Save(name, work)
    try:
        save.start()
    except (RuntimeError, MemoryError):  # no thread can be had, and the other ranks save
        save.run()
    _running.append(save)


def wait_for_saves() -> None:
    """Wait until what ``hfscale.save_state(..., asynchronous=True)`` began is on the disk; call it on every rank.

    Raises:
        CheckpointError: it failed; what its directory held before is still there.
    """
    while _running:
        save = _running.pop()
        if save.ident is not None:
            save.join()
        if save.error is not None:
            told = in_words(save.error)
            raise CheckpointError(f"the save of {save.target} behind the steps failed: {told}") from save.error


def apart(mesh: Mesh) -> Mesh:
    """The same ranks with a group of their own for what a thread has to say; the first call is collective."""
    return mesh if mesh.control is None else replace(mesh, control=_group(dist.group.WORLD))


@functools.lru_cache(maxsize=1)  # the latest process group's
def _group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return host_group([range(dist.get_world_size())])


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, pinned where they come from a GPU; complete on return."""
    copies = {}
    for key, tensor in tensors.items():
        pinned = is_accelerator(tensor.device)
        copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies[key].copy_(tensor, non_blocking=pinned)
    for device in {tensor.device for tensor in tensors.values() if is_accelerator(tensor.device)}:
        device_module(device).current_stream(device).synchronize()
    return copies
