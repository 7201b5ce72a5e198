"""Fuse chains of pointwise operations and reductions into one kernel on a GPU.

Without fusion, each operation of a chain reads and writes the full tensor. torch's compiler (Ansel et al. 2024)
compiles the chain to one Triton kernel, which reads and writes the tensor once. ``TORCH_COMPILE_DISABLE=1`` turns
fusion off.
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

# not empty after compiling has failed: callers then process rows in blocks, unfused
_broken: list[bool] = []


def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a version of ``function(tensor, ...)`` that is compiled if the tensor is on a GPU that Triton supports.

    ``function`` may write only into the tensor that it returns. If compiling fails (for example without a C compiler),
    a warning is issued once, and ``function`` runs uncompiled.
    """
    compiled: Any = None
    ran = False

    @wraps(function)
    def call(first: Tensor, *rest: Any) -> Tensor:
        nonlocal compiled, ran
        if torch.compiler.is_compiling() or not is_fused(first.device):
            return function(first, *rest)
        if compiled is None:
            allow_recompiles()  # one compilation each for row- and column-major matrices, dtypes and scales
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
                f"{function.__name__} runs unfused, so it is slower, because torch.compile could not compile it "
                f"({error})",
                stacklevel=2,
            )
            return function(first, *rest)
        ran = True
        return result

    return call


def is_fused(device: torch.device) -> bool:
    """Return whether :func:`fused` functions run compiled for tensors on ``device``."""
    return (
        is_accelerator(device)
        and makes_triton_kernels(device)
        and not _broken
        and environ.get("TORCH_COMPILE_DISABLE") != "1"
    )
