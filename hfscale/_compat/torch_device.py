"""The accelerator, and torch's module for its streams, events, generators and memory, as ``torch.cuda``.

The only file that names the accelerator: CUDA, whose name ROCm's builds of torch also use.
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
    """Return torch's module for the accelerators of this machine, whether it has any or none: ``torch.cuda``."""
    return getattr(torch, ACCELERATOR)


def is_accelerator(device: torch.device) -> bool:
    """Return whether tensors on ``device`` are computed asynchronously, in streams of another processor."""
    return device.type not in ("cpu", "meta")


def widens_products(device: torch.device) -> bool:
    """Return whether products of 16-bit matrices can be returned in 32 bits, as they are summed: ``out_dtype=``."""
    return device.type == ACCELERATOR


def device_module(device: torch.device) -> Any:
    """Return torch's module for ``device``: ``torch.cuda`` for a GPU."""
    return torch.get_device_module(device)


def keep_for_stream(tensor: Tensor, stream: Any = None) -> None:
    """Keep the memory of ``tensor`` until the work queued on ``stream``, by default the current one, has ended."""
    if is_accelerator(tensor.device):
        tensor.record_stream(stream or device_module(tensor.device).current_stream(tensor.device))


def pinned_bytes(size: int, device: torch.device) -> Tensor:
    """Return ``size`` bytes of host memory, for a GPU pinned whole pages: torch's own are powers of two, and kept."""
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
    """Return the compute capability of a GPU, as ``(9, 0)``: that of the GPU for which the meta device stands in."""
    if device.type == "meta":
        return 9, 0
    major, minor = device_module(device).get_device_capability(device)
    return int(major), int(minor)


def makes_triton_kernels(device: torch.device) -> bool:
    """Return whether torch's compiler makes Triton kernels for an accelerator here."""
    new_enough = device.type != ACCELERATOR or capability_of(device) >= (7, 0)
    return find_spec("triton") is not None and new_enough


def fork_random_state(device: torch.device) -> AbstractContextManager[Any]:
    """Restore the RNG states of the CPU and of ``device`` at the end of the ``with`` block."""
    if is_accelerator(device):
        return torch.random.fork_rng(devices=[device], device_type=device.type)
    return torch.random.fork_rng(devices=[])


def memory_in_use() -> tuple[int, int]:
    """Return the most bytes that this process has held on its accelerator, without one in all, and the bytes there."""
    if accelerators().is_available():
        return accelerators().max_memory_allocated(), accelerators().mem_get_info()[1]
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unit = 1 if sys.platform == "darwin" else 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return used, everything // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def write_memory_snapshot() -> str:
    """Write the accelerator's memory, block by block, to a temporary file, and return its path; "" if that fails."""
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
