"""Compute the bytes of optimizer state for this rank's shards, and list bitsandbytes' optimizers.

Per entry of a shard, after the first step::

    torch AdamW     2 values of the weight's dtype; per parameter 4 bytes for a step count
    8 bits          1 byte per moment; per 256 entries and moment a 4-byte scale (Dettmers et al. 2022)
    Adafactor       4 bytes per row and per column of a matrix (Shazeer and Stern 2018)
    Muon            1 value of the weight's dtype for matrices of layers; AdamW's for others (Jordan et al. 2024)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch

from ...errors import ConfigError
from ...plan.parameter import ParameterPlan
from ...plan.quantized import flat_blocks_align

BLOCK = 256  # entries per scale in bitsandbytes' 8-bit states
# The option that keeps states of embeddings in 32 bits, like HF Trainer.
WIDE_EMBEDDINGS = "embeddings_in_32_bits"
MIN_8BIT_SIZE = 4096  # bitsandbytes' default: smaller tensors have 32-bit states
_MOMENTS = {
    "AdamW": (2, 2),
    "Adam": (2, 2),
    "AdEMAMix": (3, 2),
    "Lion": (1, 1),
    "RMSprop": (1, 1),
}
# The values above: moments per entry, and tables of 8-bit values, by bitsandbytes' class
_CODE_BOOK = 4 * 256  # bytes of the table of 8-bit values of one moment
_COUNT = 4  # bytes of a count of steps


@dataclass(frozen=True)
class BitsAndBytesOptimizer:
    """Describe one of bitsandbytes' optimizers: its class, the bits of its state, and whether the state is paged."""

    stock: str  # the class in bitsandbytes
    bits: int  # bits per value of the state
    paged: bool = False  # whether a full GPU's state moves to CPU memory


_BITSANDBYTES_NAMES = {
    "Adam": ("adam_8bit",),
    "AdamW": ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    "AdEMAMix": ("ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit"),
    "Lion": ("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"),
    "RMSprop": ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
}
BITSANDBYTES = {
    name: BitsAndBytesOptimizer(
        stock, 8 if name.endswith("_8bit") else 32, name.startswith("paged_")
    )
    for stock, names in _BITSANDBYTES_NAMES.items()
    for name in names
}
"""Map HF Trainer's names of bitsandbytes' optimizers, and the additional name ``adam_8bit``, to their descriptions."""

_TORCH = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
NAMES = (*_TORCH, "adafactor", "muon", *BITSANDBYTES)
"""Names of the optimizers whose state's bytes can be computed; :func:`hfscale.create_optimizer` accepts the same
names.
"""


def optimizer_bytes(
    trained: Sequence[ParameterPlan],
    ranks: dict[str, int],
    name: str,
    options: Mapping[str, Any] | None = None,
    layers: Sequence[str] = (),
    stacks: Sequence[str] = (),
    lookup: str | None = None,
) -> int:
    """Return the bytes of the state of the optimizer ``name`` after its first step, on the rank at the coordinates
    ``ranks``, for its shards of the parameters ``trained``.

    ``options`` are those that change the state: ``momentum``, ``amsgrad``, ``min_8bit_size``,
    ``embeddings_in_32_bits``, ``experts``. ``layers`` are the names of the layers, whose matrices Muon updates;
    ``stacks`` are the names of the modules with stacked experts; ``lookup`` is the name of the token embedding.
    """
    given = dict(options or {})
    if given.get("stochastic_rounding"):  # the optimizer steps 32-bit copies
        trained = [
            replace(p, dtype=torch.float32) if p.dtype == torch.bfloat16 else p for p in trained
        ]
    if name in BITSANDBYTES:
        return _bitsandbytes_bytes(trained, ranks, BITSANDBYTES[name], given, f"{lookup}.weight")
    if name == "adafactor":
        return sum(_adafactor_bytes(planned, ranks, given) for planned in trained)
    if name == "muon":
        inside = tuple(f"{layer}." for layer in layers)
        chosen = stacks if given.get("experts") else ()
        return sum(_muon_bytes(planned, ranks, inside, chosen) for planned in trained)
    if name not in _TORCH:
        raise ConfigError(f"optimizer {name!r} is unknown: use one of {', '.join(sorted(NAMES))}")
    if name == "sgd":
        return sum(
            _bytes_of_tensors(planned, ranks, int(bool(given.get("momentum"))), counts=False)
            for planned in trained
        )
    tensors = {
        "adagrad": 1,
        "rmsprop": 1 + bool(given.get("momentum")) + bool(given.get("centered")),
    }
    return sum(
        _bytes_of_tensors(planned, ranks, tensors.get(name, 2 + bool(given.get("amsgrad"))))
        for planned in trained
    )


def _bytes_of_tensors(
    planned: ParameterPlan,
    ranks: dict[str, int],
    tensors: int,
    counts: bool = True,
) -> int:
    """Return the bytes of an optimizer state that has ``tensors`` tensors of the shard's size and dtype and, with
    ``counts``, a count of steps; 0 for an empty shard.
    """
    entries = prod(planned.local_shape(ranks))
    return (tensors * entries * planned.dtype.itemsize + _COUNT * counts) if entries else 0


def _muon_bytes(
    planned: ParameterPlan,
    ranks: dict[str, int],
    layers: tuple[str, ...],
    stacks: Sequence[str],
) -> int:
    dims = 3 if planned.name.rpartition(".")[0] in stacks else 2
    hidden = len(planned.shape) == dims and planned.name.startswith(layers)
    return (
        _bytes_of_tensors(planned, ranks, 1, counts=False)
        if hidden
        else _bytes_of_tensors(planned, ranks, 2)
    )


def _bitsandbytes_bytes(
    trained: Sequence[ParameterPlan],
    ranks: dict[str, int],
    kind: BitsAndBytesOptimizer,
    options: dict[str, Any],
    embedding: str,
) -> int:
    wide = embedding if options.get(WIDE_EMBEDDINGS) else ""
    moments, books = _MOMENTS[kind.stock]
    least = int(options.get("min_8bit_size", MIN_8BIT_SIZE))
    total = shared = 0
    for planned in trained:
        entries = prod(planned.local_shape(ranks))
        whole = prod(planned.shape)
        if kind.bits == 32 or whole < least or wide in (planned.name, planned.tied_to):
            total += 4 * moments * entries
        elif flat_blocks_align(planned, BLOCK):
            # Shards are updated in place by one optimizer, so all of them use one code book.
            total += moments * (entries + 4 * ceil(entries / BLOCK))
            shared = shared or (books * _CODE_BOOK if entries else 0)
        else:
            total += moments * (whole + 4 * ceil(whole / BLOCK)) + books * _CODE_BOOK
    return total + shared


def _adafactor_bytes(
    planned: ParameterPlan,
    ranks: dict[str, int],
    options: dict[str, Any],
) -> int:
    local = planned.local_shape(ranks)
    size = max(4, planned.dtype.itemsize)
    kept = prod(local[:-1]) + prod(local[:-2]) * local[-1] if len(local) >= 2 else prod(local)
    kept += prod(local) * (options.get("beta1") is not None)
    return size * (kept + bool(options.get("scale_parameter", False)))
