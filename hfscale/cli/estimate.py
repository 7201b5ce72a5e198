"""``hfscale estimate``: seconds and bytes of a layout, before anything is rented."""

import argparse
from pathlib import Path

from .layout import add_layout_arguments, layout_of
from .memory import plan_arguments
from .model import add_model_arguments, auto_class_of, building, load_config, remote_code

HELP = "estimate seconds and bytes of a training step under a layout"
DESCRIPTION = (
    "Estimate what a training step of a model takes and holds under a layout: for every pipeline rank bytes by kind, "
    "for the step seconds by term, and whether it fits. Reads only the config: no weights, no processes, no GPU."
)
EXAMPLE = "hfscale estimate Qwen/Qwen3-8B --tp 2 --dp-shard 4 --hardware h100 --microbatches 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``hfscale estimate``."""
    add_model_arguments(parser)
    add_layout_arguments(parser)
    add_run_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences of one microbatch")
    parser.add_argument("--accumulate", type=int, metavar="N", help="microbatches of a step, also without stages")
    parser.add_argument("--recompute", default="none", metavar="HOW", help="none, selective, full, or every n-th layer")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures as well")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say on what, and of what kind, a run is."""
    parser.add_argument(
        "--hardware", default="h100", metavar="NAME", help="h100, h200, b200, a100-80, a100-40, or a calibration's JSON"
    )
    parser.add_argument("--sequence-length", type=int, default=4096, metavar="N", help="tokens of a sequence")
    parser.add_argument("--optimizer", default="adamw_torch_fused", metavar="NAME", help="its name in HF Trainer")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no", help="over the weights' own type")
    parser.add_argument("--quantize", choices=("nf4", "fp4", "int8"), help="weights in 4 or 8 bits")
    parser.add_argument(
        "--lora", metavar="TARGETS", nargs="?", const="all-linear", help="train LoRA adapters: all-linear, or names"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="of the adapters (default: 16)")


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate."""
    from ..forecast.estimate import estimate
    from ..memory_config import MemoryConfig

    layout = layout_of(arguments)
    config = load_config(arguments.model, arguments.trust_remote_code)
    again, more = arguments.recompute, {**plan_arguments(arguments), **remote_code(arguments)}
    with building(arguments, config):
        found = estimate(
            config,
            layout,
            arguments.hardware,
            sequence_length=arguments.sequence_length,
            batch_size=arguments.batch_size,
            num_microbatches=arguments.accumulate,
            optimizer=arguments.optimizer,
            mixed_precision=arguments.mixed_precision,
            auto_class=auto_class_of(arguments.auto_class),
            dtype=arguments.dtype,
            memory=MemoryConfig(recompute=int(again) if again.isdigit() else again),
            **more,
        )
    print(found.to_json() if arguments.json else found)
    if arguments.html is not None:
        from ..forecast.html import page_of

        arguments.html.write_text(page_of(found, f"{arguments.model}: {found.layout}"))
    return 0
