"""Fuse chains of pointwise operations and reductions into one kernel on a GPU.

Run one by one, each operation reads and writes all its entries; torch's compiler (Ansel et al. 2024) makes of a chain
one Triton kernel, which reads and writes them once. ``TORCH_COMPILE_DISABLE=1`` turns it off.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from os import environ
from typing import Any

import torch
from torch import Tensor

from ..._compat.torch import allow_recompiles
from ..._compat.torch_device import is_accelerator, makes_triton_kernels

_broken: list[bool] = []  # not empty once compiling has failed: callers then work in blocks again


def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``function(tensor, ...)``, compiled where the tensor is on a GPU for which Triton makes kernels.

    It may write only into what it returns. Where compiling it fails (no C compiler), a warning says so, and it runs.
    """
    compiled: Any = None
    ran = False

    @wraps(function)
    def call(first: Tensor, *rest: Any) -> Tensor:
        nonlocal compiled, ran
        if torch.compiler.is_compiling() or not is_fused(first.device):
            return function(first, *rest)
        if compiled is None:
            allow_recompiles()  # for row- and column-major matrices, dtypes, scales
            compiled = torch.compile(function, dynamic=True)
        try:
            result: Tensor = compiled(first, *rest)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if ran:
                raise
            _broken.append(True)
            warnings.warn(
                f"{function.__name__} runs unfused, and slower: it could not be compiled ({error})",
                stacklevel=2,
            )
            return function(first, *rest)
        ran = True
        return result

    return call


def is_fused(device: torch.device) -> bool:
    """Return whether functions are fused for tensors on ``device``."""
    return (
        is_accelerator(device)
        and makes_triton_kernels(device)
        and not _broken
        and environ.get("TORCH_COMPILE_DISABLE") != "1"
    )
