"""Flags shared by several subcommands: layout, adapters, quantization, machine and optimizer."""

import argparse
from typing import TYPE_CHECKING, Any, Protocol

from ..config.declared import declared
from ..config.layout import LayoutFields
from ..config.sections import ESTIMATED_PRECISIONS
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.parallel import ParallelConfig


OPTIMIZER = "adamw_torch_fused"  # the default optimizer: HF Trainer's own
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
    "as_stored": {"as_stored": True},
}
"""Kinds of ``--quantize``, as a recipe has them."""
ON_HOST = ("parameters", "optimizer", "activations")


class Adds(Protocol):
    """A parser, or an argument group of one."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add one argument."""
        ...


def add_lora(parser: Adds, what: str) -> None:
    """Add ``--lora``; ``what`` begins its help."""
    told = f"{what}: all-linear (the default), or names joined by commas"
    parser.add_argument("--lora", metavar="TARGETS", nargs="?", const="all-linear", help=told)


def add_training_arguments(parser: Adds) -> None:
    """Add the flags of adapters, weights in fewer bits, optimizer, precision and memory for :func:`plan_arguments`."""
    parser.add_argument("--quantize", choices=tuple(QUANTIZATIONS), help="weights in 4 or 8 bits, or as stored")
    add_lora(parser, "train LoRA adapters")
    parser.add_argument("--rank", type=int, metavar="R", help="rank of the adapters (default: 16)")
    parser.add_argument("--optimizer", metavar="NAME", help=f"its name in HF Trainer (default: {OPTIMIZER})")
    told = "compute in bfloat16 over the weights' own type, products of layers in 8 bits"
    parser.add_argument("--mixed-precision", choices=ESTIMATED_PRECISIONS, help=told)
    told = "none, elementwise, selective, full (without HOW), every n-th layer, or a budget as 8GiB"
    parser.add_argument("--recompute", metavar="HOW", nargs="?", const="full", help=told)
    parser.add_argument("--tile-tokens", type=int, metavar="N", help="run norms and MLPs in tiles of N tokens")
    parser.add_argument("--offload", metavar="WHAT,...", help=f"to the host: any of {', '.join(ON_HOST)}")


def plan_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of :func:`hfscale.plan` for adapters, quantized weights, precision and memory."""
    from transformers import BitsAndBytesConfig

    from ..config.memory import MemoryConfig

    on_host = list(filter(None, (arguments.offload or "").split(",")))
    if unknown := set(on_host).difference(ON_HOST):
        raise ConfigError(f"--offload {unknown.pop()} is unknown: use activations, parameters or optimizer, or several")
    again, away = arguments.recompute or "none", dict[str, Any]((f"offload_{name}", True) for name in on_host)
    memory = MemoryConfig(int(again) if again.isdigit() else again, tile_tokens=arguments.tile_tokens, **away)
    given: dict[str, Any] = {"memory": memory, "mixed_precision": arguments.mixed_precision or "no"}
    kind, rank = arguments.quantize, arguments.rank
    if rank is not None and (rank < 1 or arguments.lora is None):
        raise ConfigError(f"--rank must be a whole number of at least 1, with --lora, got {rank}")
    if kind is not None:
        given["quantization_config"] = kind if kind == "as_stored" else BitsAndBytesConfig(**QUANTIZATIONS[kind])
    if arguments.lora is not None:
        from ..features.adapters.storage import config_class

        names = arguments.lora if arguments.lora == "all-linear" else arguments.lora.split(",")
        given["peft_config"] = config_class("lora")[0](r=rank or 16, target_modules=names, task_type="CAUSAL_LM")
    return given


def add_machine_arguments(parser: Adds) -> None:
    """Add ``--hardware`` and ``--sequence-length``, which :func:`.amounts.tokens_of` reads."""
    told = "h100, h200, b200, gb200, gb300, a100-80, a100-40, or a calibration's JSON"
    parser.add_argument("--hardware", default="h100", metavar="NAME", help=told)
    told = "tokens of a sequence, as 8192 or 8K (default: 4K)"
    parser.add_argument("--sequence-length", default="4096", metavar="N", help=told)


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of a layout."""
    # Values stay strings here: ParallelConfig checks them, and fills in those left out.
    layout = parser.add_argument_group("layout")
    for each in declared(LayoutFields):
        if each.kind is bool:
            layout.add_argument(each.flag, action=argparse.BooleanOptionalAction, help=each.help)
        else:
            metavar = "NAME" if each.choices else "N" if each.kind is int else "N,N,..."
            layout.add_argument(each.flag, metavar=metavar, help=each.help)


def layout_of(arguments: argparse.Namespace) -> "ParallelConfig":
    """Return the layout that the flags describe."""
    from ..config.parallel import ParallelConfig
    from ..parallel.pipeline.orders import check_layout

    known = declared(LayoutFields)
    layout = ParallelConfig(**{each.name: getattr(arguments, each.dest) for each in known})
    axes = {each.flag: each.text for each in known}
    for axis in filter(None, dict.fromkeys(each.needs for each in known)):
        given = [each.flag for each in known if each.needs == axis and getattr(arguments, each.dest) is not None]
        if given and layout.asked(axis) == 1:
            raise ConfigError(f"{', '.join(given)} needs several {axes[f'--{axis}']}: give --{axis} 2 or more as well")
    check_layout(layout)
    return layout
