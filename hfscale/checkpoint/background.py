"""Asynchronous saves: one at a time, in a thread with its own process group.

Steps wait only for the copy to CPU memory. The next save, and the end of the process, wait for the previous save and
raise its error on every rank.
"""

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat.torch_device import device_module, is_accelerator
from ..distributed.mesh import Mesh
from ..distributed.processes import host_group
from ..errors import CheckpointError, in_words
from ..train.runtime.writing import saving


class _Save(threading.Thread):
    """A thread that saves; not a daemon, so the process does not end before it."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=f"hfscale-save {name}", daemon=False)
        self.target, self.work = name, work
        self.error: BaseException | None = None

    @saving()
    def run(self) -> None:
        """Save; keep an error for :func:`wait_for_saves`, and print it in case nobody waits."""
        try:
            self.work()
        except BaseException as error:  # kept, or wait_for_saves would take the save for done
            self.error = error
            told = in_words(error)
            print(f"hfscale: the asynchronous save of {self.target} failed: {told}", file=sys.stderr, flush=True)


_running: list[_Save] = []


def begin_save(name: str, work: Callable[[], None]) -> None:
    """Run ``work`` in a thread, once the previous save is done."""
    wait_for_saves()
    save = _Save(name, work)
    try:
        save.start()
    except (RuntimeError, MemoryError):  # no thread could be started, but the other ranks save
        save.run()
    _running.append(save)


def wait_for_saves() -> None:
    """Wait until the last ``hfscale.save_state(..., asynchronous=True)`` is on disk; call it on every rank.

    Raises:
        CheckpointError: it failed; the previous content of its directory is still there.
    """
    while _running:
        save = _running.pop()
        if save.ident is not None:
            save.join()
        if save.error is not None:
            told = in_words(save.error)
            raise CheckpointError(f"the asynchronous save of {save.target} failed: {told}") from save.error


def apart(mesh: Mesh) -> Mesh:
    """Return the mesh with a separate control group for a thread's messages; the first call is collective."""
    return mesh if mesh.control is None else replace(mesh, control=_group(dist.group.WORLD))


@functools.lru_cache(maxsize=1)  # the latest process group's
def _group(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return host_group([range(dist.get_world_size())])


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to CPU memory, pinned if they come from a GPU; complete on return."""
    copies = {}
    for key, tensor in tensors.items():
        pinned = is_accelerator(tensor.device)
        copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies[key].copy_(tensor, non_blocking=pinned)
    for device in {tensor.device for tensor in tensors.values() if is_accelerator(tensor.device)}:
        device_module(device).current_stream(device).synchronize()
    return copies
