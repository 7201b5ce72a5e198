"""How torch makes gloo backends; read and run with torch 2.11 to 2.13."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class _OfOneDevice(dist.ProcessGroupGloo):
    """A backend whose sockets are served by the thread that serves those of every other group of the process."""

    _device: Any = None

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [self._only_device()]
        super().__init__(store, rank, size, options)

    @classmethod
    def _only_device(cls) -> Any:
        cls._device = cls._device or dist.ProcessGroupGloo.create_default_device()
        return cls._device


def share_gloo_thread() -> None:
    """Let the gloo groups that are made from here on share one thread.

    Each of torch's own starts a thread that wakes up a hundred times a second: of a process that makes hundreds of
    groups in its life, that is most of the work.
    """
    distributed_c10d.ProcessGroupGloo = _OfOneDevice  # type: ignore[misc]
