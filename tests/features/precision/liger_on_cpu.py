"""Liger's kernels without a GPU: Triton's interpreter runs them in Python, with TRITON_INTERPRET=1."""

from functools import cache
from typing import Any

import numpy as np


@cache
def prepare() -> None:
    """Have the interpreter do what Triton's compiler does for these kernels; call it in each process before they run.

    Arguments that are Python's floats are float32 scalars; ``rsqrt`` and ``tanh`` are functions of CUDA's library. Of
    float64 there is nothing in Liger's table of types, so that its norms have no backward pass in it; with that, they
    compute in float32 as they do for narrower types.
    """
    import torch
    from liger_kernel.ops import geglu, rms_norm, utils
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if isinstance(value, float):
            handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(value)

    interpreter._implicit_cvt = with_floats
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    utils.torch_to_triton_dtype[torch.float64] = tl.float64
