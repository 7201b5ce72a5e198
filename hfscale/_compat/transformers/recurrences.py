"""Describe the functions of stock modules that read earlier tokens: causal convolutions and scans, and how each
function takes a state.

Stock mixers (gated delta nets, KDA, Mamba, Mamba-2, short convolutions) compute token by token, except for two
functions of their file, which have the same names in all families. So one description of a function holds for every
family that calls it, and for the kernels (fla, mamba_ssm, causal_conv1d) by which transformers replaces it if they are
installed.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache

from ..replaced import attribute_replaced

CONVOLUTION = "causal_conv1d_fn"
"""Name of the causal convolution, ``(x [b, d, s], weight [d, width], ...)`` -> ``[b, d, s]``, with batch size ``b``,
channels ``d`` and tokens ``s``.
"""
_FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Kernels that fuse convolution, scan and projections; if one returns nothing, a mixer calls the separate functions."""
_BORDERS = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")

READING = ("query", "C", "D", "z")
"""Arguments that read the state of a scan, but do not change the state."""

Named = Mapping[str, Any]
"""The named arguments of a call."""


@dataclass(frozen=True)
class Scan:
    """Describe a scan over tokens (a recurrence) whose output and final state are linear in its initial state: its
    arguments, the shape of its state, and how it takes an initial state.
    """

    # Argument -> the dim of its tokens, which is also the dim of the output's tokens.
    tokens: Mapping[str, int]
    output: str  # the output has the shape of this argument
    final: str  # this argument asks for the final state as second result
    shape: Callable[[Named], tuple[int, ...]]  # shape of the state
    initial: str = ""  # this argument is the initial state; empty: no such argument
    pairs: bool = False  # whether there is always a second result: state or ``None``
    # for functions without an initial state: returns what a state would add to the output and to the final state
    adds: Callable[[Named, Tensor], tuple[Tensor, Tensor]] | None = None
    # for functions whose kernel returns the final state without a gradient: computes the final state from zeros
    makes: Callable[[Named], Tensor] | None = None


def _mamba_steps(given: Named, dtype: torch.dtype) -> Tensor:
    """Return the step sizes of ``mamba_selective_scan`` from its named arguments, ``[b, d, s]``: batch, channels,
    tokens.
    """
    dt = given["dt"]
    if given.get("delta_bias") is not None:
        dt = dt + given["delta_bias"].to(dt.dtype)[..., None]
    return (F.softplus(dt) if given.get("delta_softplus") else dt).to(dtype)


def _mamba_makes(given: Named) -> Tensor:
    """Return the final state of ``mamba_selective_scan``, computed from its named arguments with an initial state of
    zeros: ``[b, d, n]`` (batch, channels, state size).
    """
    x = given["hidden_states"]
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = _mamba_steps(given, wide)
    total = steps.cumsum(-1)
    # [b, d, s, n].
    left = torch.exp(given["A"].to(wide)[None, :, None] * (total[..., -1:] - total)[..., None])
    return torch.einsum(
        "bdsn,bds,bns->bdn",
        left,
        steps * x.to(wide),
        given["B"].to(wide),
    )


def _mamba_adds(given: Named, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return two terms that an initial ``state [b, d, n]`` (batch, channels, state size) adds to
    ``mamba_selective_scan``: one to its output, and one to its final state, which is the decayed initial state (Gu and
    Dao 2023, equation 2).
    """
    c = given["C"]
    gate = given.get("z")
    total = _mamba_steps(given, state.dtype).cumsum(-1)
    # [b, d, s, n].
    there = (
        torch.exp(given["A"].to(state.dtype)[None, :, None] * total[..., None]) * state[:, :, None]
    )
    read = torch.einsum("bdsn,bns->bds", there, c.to(state.dtype))
    return (read if gate is None else read * F.silu(gate)), there[:, :, -1]


_DELTA = Scan(
    dict.fromkeys(("query", "key", "value", "g", "beta"), 1),
    "value",
    "output_final_state",
    lambda given: (
        len(given["key"]),
        given["value"].shape[2],
        given["key"].shape[3],
        given["value"].shape[3],
    ),
    "initial_state",
    pairs=True,
)
SCANS: dict[str, Scan] = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Scan(
        dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 1),
        "hidden_states",
        "return_final_states",
        lambda given: (
            *given["hidden_states"].shape[::2],
            given["hidden_states"].shape[3],
            given["B"].shape[3],
        ),
        "initial_states",
    ),
    "mamba_selective_scan": Scan(
        dict.fromkeys(("hidden_states", "dt", "B", "C", "z"), 2),
        "hidden_states",
        "return_last_state",
        lambda given: (*given["hidden_states"].shape[:2], given["A"].shape[1]),
        adds=_mamba_adds,
        makes=_mamba_makes,
    ),
}
"""Supported scans by function name."""


def reads_by_functions(module: nn.Module) -> bool:
    """Return whether the forward pass of a stock module of transformers calls the causal convolution or a supported
    scan (see :data:`SCANS`).
    """
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return False
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return not {CONVOLUTION, *SCANS}.isdisjoint(getattr(code, "co_names", ()))


def functions_replaced(
    kind: type, replace: Callable[[str, Any], Any]
) -> AbstractContextManager[Any]:
    """Replace the causal convolution and the supported scans (see :data:`SCANS`) by ``replace(name, function)`` inside
    the ``with`` block, in the Python file that defines class ``kind``. Fused kernels in this file return nothing, so
    that mixers call the separate functions.
    """
    file = sys.modules[kind.__module__]
    stack = ExitStack()
    for name in (CONVOLUTION, *SCANS):
        if hasattr(file, name):
            stack.enter_context(attribute_replaced(file, name, replace(name, getattr(file, name))))
    for name in _FUSED:
        if hasattr(file, name):
            # Return nothing, like transformers' stand-ins for kernels that are not installed.
            stack.enter_context(attribute_replaced(file, name, lambda *_, **__: None))
    return stack


def without_states(args: tuple[Any, ...], kwargs: Named) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a mixer's arguments without caches and document borders, since states are those of a single document."""
    return tuple(None if isinstance(arg, Cache) else arg for arg in args), {
        name: None if isinstance(arg, Cache) else arg
        for name, arg in kwargs.items()
        if name not in _BORDERS
    }
