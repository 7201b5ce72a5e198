"""``hfscale estimate``: estimate seconds and bytes of a step under a layout."""

import argparse
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .amounts import tokens_of
from .look import add_json, check_writable, show
from .model import add_model_arguments, auto_class_of, load_config, remote_code
from .model_flags import add_adapter_arguments, add_layout_arguments, add_machine_arguments, layout_of, plan_arguments

HELP = "estimate seconds and bytes of a training step under a layout"
DESCRIPTION = (
    "Estimate what a training step of a model takes and holds under a layout: for every pipeline rank bytes by kind, "
    "for the step seconds by term, and whether it fits. Reads only the config: no weights, no processes, no GPU."
)
EXAMPLE = "hfscale estimate Qwen/Qwen3-8B --tp 2 --dp-shard 4 --hardware h100 --microbatches 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_layout_arguments(parser)
    add_machine_arguments(parser)
    add_adapter_arguments(parser)
    parser.add_argument("--mixed-precision", choices=("no", "bf16", "bf16_params"), default="no", help="of products")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences of one microbatch")
    parser.add_argument("--accumulate", type=int, metavar="N", help="microbatches of a step, also without stages")
    parser.add_argument(
        "--recompute", default="none", metavar="HOW", help="none, elementwise, selective, full, or every n-th layer"
    )
    parser.add_argument("--tile-tokens", type=int, metavar="N", help="run norms and MLPs in tiles of N tokens")
    parser.add_argument("--offload", default="", metavar="WHAT,...", help="any of activations, parameters, optimizer")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures as well")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    check_writable(arguments.html)
    offloaded = [name for name in arguments.offload.split(",") if name]
    for name in offloaded:
        if name not in ("activations", "parameters", "optimizer"):
            raise ConfigError(f"--offload {name} is unknown: use activations, parameters or optimizer, or several")
    from ..config.memory import MemoryConfig
    from ..cost.tools.estimate import estimate

    layout, sequence = layout_of(arguments), tokens_of(arguments.sequence_length, "--sequence-length")
    config = load_config(arguments.model, arguments.trust_remote_code)
    again, more = arguments.recompute, {**plan_arguments(arguments), **remote_code(arguments)}
    found = estimate(
        config,
        layout,
        arguments.hardware,
        sequence_length=sequence,
        batch_size=arguments.batch_size,
        num_microbatches=arguments.accumulate,
        optimizer=arguments.optimizer,
        mixed_precision=arguments.mixed_precision,
        auto_class=auto_class_of(arguments.auto_class),
        dtype=arguments.dtype,
        memory=MemoryConfig(
            recompute=int(again) if again.isdigit() else again,
            tile_tokens=arguments.tile_tokens,
            **dict[str, Any]((f"offload_{name}", True) for name in offloaded),
        ),
        **more,
    )
    show(arguments, found.to_dict(), str(found))
    if arguments.html is not None:
        from ..cost.tools.html import page_of

        arguments.html.write_text(page_of(found, f"{arguments.model}: {found.layout}"))
