"""The accelerator, and torch's module for the accelerator's streams, events, generators and memory: ``torch.cuda``.

This is the only file that names the accelerator: CUDA, a name that torch also uses in its builds for ROCm.
"""

import os
import resource
import sys
import tempfile
import weakref
from contextlib import AbstractContextManager
from importlib.util import find_spec
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor

ACCELERATOR = "cuda"


def accelerators() -> Any:
    """Return torch's module for accelerators, ``torch.cuda``, even if this machine has no accelerator."""
    return getattr(torch, ACCELERATOR)


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` computes asynchronously, in streams: neither the CPU nor the meta device."""
    return device.type not in ("cpu", "meta")


def widens_products(device: torch.device) -> bool:
    """Return whether matrix products of 16-bit tensors can return their 32-bit sums unrounded (``out_dtype=``)."""
    return device.type == ACCELERATOR


def device_module(device: torch.device) -> Any:
    """Return torch's module for ``device``: ``torch.cuda`` for a GPU."""
    return torch.get_device_module(device)


def keep_for_stream(tensor: Tensor, stream: Any = None) -> None:
    """Keep the memory of ``tensor`` until the work queued on ``stream`` (default: the current stream) has ended."""
    if is_accelerator(tensor.device):
        tensor.record_stream(stream or device_module(tensor.device).current_stream(tensor.device))


def pinned_bytes(size: int, device: torch.device) -> Tensor:
    """Return ``size`` bytes of CPU memory, pinned for a GPU. Only whole pages are pinned, unlike in torch, which rounds
    up to powers of two and keeps freed memory.
    """
    if device.type != ACCELERATOR:
        return torch.empty(size, dtype=torch.uint8)
    pages = -(-size // PAGESIZE) * PAGESIZE
    runtime = accelerators().cudart()
    memory = torch.empty(pages + PAGESIZE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % PAGESIZE :][:pages]
    accelerators().check_error(int(runtime.cudaHostRegister(memory.data_ptr(), pages, 0)))
    weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr())
    return memory[:size]


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, such as ``(9, 0)``; the meta device stands for a GPU of ``(9, 0)``."""
    if device.type == "meta":
        return 9, 0
    major, minor = device_module(device).get_device_capability(device)
    return int(major), int(minor)


def makes_triton_kernels(device: torch.device) -> bool:
    """Return whether torch's compiler makes Triton kernels for an accelerator on this machine."""
    new_enough = device.type != ACCELERATOR or capability_of(device) >= (7, 0)
    return find_spec("triton") is not None and new_enough


def fork_random_state(device: torch.device) -> AbstractContextManager[Any]:
    """Restore the RNG states of the CPU and of ``device`` after the ``with`` block."""
    if is_accelerator(device):
        return torch.random.fork_rng(devices=[device], device_type=device.type)
    return torch.random.fork_rng(devices=[])


def memory_in_use() -> tuple[int, int]:
    """Return the peak bytes that this process has used and the bytes that it may use: on its accelerator, or else in
    RAM.
    """
    if accelerators().is_available():
        return accelerators().max_memory_allocated(), accelerators().mem_get_info()[1]
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unit = 1 if sys.platform == "darwin" else 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return used, everything // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def write_memory_snapshot() -> str:
    """Write the list of the accelerator's memory blocks to a temporary file; return the path, or "" if that fails."""
    if not accelerators().is_available():
        return ""
    handle, path = tempfile.mkstemp(prefix="hfscale-memory-", suffix=".pickle")
    os.close(handle)
    try:
        torch.cuda.memory._dump_snapshot(path)
    except (AttributeError, RuntimeError, OSError):
        os.unlink(path)
        return ""
    return path
