"""Flags of training, and whether it fits on a GPU."""

import argparse
from typing import TYPE_CHECKING

from ..config.sections import ESTIMATED_PRECISIONS
from .amounts import gigabytes_of, tokens_of
from .model_flags import OPTIMIZER, add_adapter_arguments

if TYPE_CHECKING:
    from ..cost.model.memory_model import MemoryEstimate
    from ..plan import Plan

_TOKENS, _GB = "2048", "80"


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of adapters, quantized weights, optimizer, tokens, and memory of a GPU."""
    group = parser.add_argument_group("training (any of these adds what a rank holds, by kind, and whether it fits)")
    add_adapter_arguments(group, "weights in 4 or 8 bits, and where they align")
    group.add_argument(
        "--tokens", metavar="N", help=f"of one microbatch of a batch rank, as 4096 or 4K (default: {_TOKENS})"
    )
    group.add_argument("--optimizer", metavar="NAME", help=f"as adamw_8bit or adafactor (default: {OPTIMIZER})")
    group.add_argument(
        "--mixed-precision",
        choices=ESTIMATED_PRECISIONS,
        help="compute in bfloat16 over the weights' own type, products of layers in 8 bits",
    )
    group.add_argument("--recompute", action="store_true", default=None, help="recompute layers in the backward pass")
    group.add_argument(
        "--gpu", metavar="SIZE", help=f"memory of one GPU, as 80GB (10^9), 80 or 80GiB (2^30) (default: {_GB}GB)"
    )


def is_asked(arguments: argparse.Namespace) -> bool:
    """Return whether any flag of training is given."""
    names = ("quantize", "lora", "rank", "tokens", "optimizer", "mixed_precision", "recompute", "gpu")
    return any(getattr(arguments, name) is not None for name in names)


def estimate(arguments: argparse.Namespace, plan: "Plan") -> "MemoryEstimate":
    """Estimate the memory of the rank with most.

    Raises:
        ConfigError: the optimizer is unknown, or ``--tokens`` is no number.
    """
    from ..cost.tools.memory_report import memory_estimate

    return memory_estimate(
        plan,
        arguments.optimizer or OPTIMIZER,
        tokens=tokens_asked(arguments),
        gradient_checkpointing=arguments.recompute,
        mixed_precision=arguments.mixed_precision,
    )


def fits(arguments: argparse.Namespace, found: "MemoryEstimate") -> bool:
    """Return whether the estimate is below the memory of a GPU."""
    return found.total < _gigabytes(arguments) * 1e9


def describe_fit(arguments: argparse.Namespace, found: "MemoryEstimate") -> str:
    """Return one line on whether the model fits, and if not, on how to make it fit."""
    size, total = _gigabytes(arguments), found.total / 1e9
    if fits(arguments, found):
        return f"fits {size:g} GB: yes, {total:.1f} GB of it, without what kernels and collectives use meanwhile"
    kind = max(found.kinds, key=lambda name: found.kinds[name])
    return (
        f"fits {size:g} GB: no, {total:.1f} GB, most of it {kind}: use more ranks, fewer --tokens, --recompute, an "
        "8-bit --optimizer, or --lora over --quantize nf4"
    )


def _gigabytes(arguments: argparse.Namespace) -> float:
    return gigabytes_of(_GB if arguments.gpu is None else arguments.gpu, "--gpu")


def tokens_asked(arguments: argparse.Namespace) -> int:
    """Return the tokens of one microbatch."""
    return tokens_of(_TOKENS if arguments.tokens is None else arguments.tokens, "--tokens")


def check_amounts(arguments: argparse.Namespace) -> None:
    """Refuse impossible ``--tokens`` and ``--gpu`` before anything is planned."""
    tokens_asked(arguments)
    _gigabytes(arguments)
