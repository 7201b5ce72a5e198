"""Write a checkpoint with a saved adapter merged into it. Tensors that the adapter does not change are copied as they
are stored. The result is checked before it gets its name: the base model with the adapter and the merged model are
loaded, one after the other, and the largest difference of their logits is printed; if it is larger than rounding
explains, nothing is written.
"""

import argparse
from pathlib import Path

from .look import add_conversion, check_directory, check_target, conversion_of, print_json, working

HELP = "merge a saved adapter into its base, one module in memory at a time"
EXAMPLE = "hfscale merge path/to/base runs/mine/adapter out"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", type=Path, help="the directory of the checkpoint")
    parser.add_argument(
        "adapter",
        metavar="ADAPTER",
        type=Path,
        help="the directory of the adapter, in PEFT's format",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the directory to write")
    parser.add_argument(
        "--no-check", action="store_true", help="do not load the models to compare their logits"
    )
    add_conversion(parser)


def run(arguments: argparse.Namespace) -> None:
    check_directory(arguments.base, "the checkpoint that the adapter was trained on")
    check_directory(arguments.adapter, "an adapter (with adapter_config.json)")
    check_target(arguments.out, arguments.overwrite, BASE=arguments.base, ADAPTER=arguments.adapter)
    from ..api.adapter_files import logit_difference, merge_adapter

    differences: list[float] = []

    def check(written: Path) -> None:
        working("comparing the logits of both")
        trusted = arguments.trust_remote_code
        differences.append(logit_difference(arguments.base, arguments.adapter, written, trusted))

    places = arguments.base, arguments.adapter, arguments.out
    changed = merge_adapter(
        *places, **conversion_of(arguments), check=None if arguments.no_check else check
    )
    difference = differences[0] if differences else None
    if arguments.json:
        print_json({"directory": arguments.out, "changed": changed, "logit_difference": difference})
        return
    print(f"{arguments.out}: {changed} tensors have the adapter in them")
    if difference is not None:
        print(f"logits differ by {difference:.1e} of the largest logit, at the most")
