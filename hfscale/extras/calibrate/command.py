"""Time matrix products, attention, a copy, one real layer, the loss, the optimizer and collectives on this machine, in
at most a minute, and write the result as a file for --hardware and hfscale.estimate.
"""

import argparse
from pathlib import Path

from ...cli.look import check_writable, print_json, working
from ...errors import ConfigError

HELP = "measure this machine, GPU or CPU, for hfscale estimate and search"
_SIZES = (4 << 10, 1 << 20, 16 << 20)  # bytes of the messages for measuring links
JSON = False
EXAMPLE = "hfscale calibrate --out mine.json && hfscale estimate MODEL --hardware mine.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the result to this file (default: print it)"
    )
    parser.add_argument(
        "--name", default="this machine", help="name of this machine (default: %(default)s)"
    )
    parser.add_argument(
        "--like", metavar="NAME", help="a known machine; use its links instead of measuring links"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="ranks to measure links between (default: one per GPU, or 2; 1: no links)",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="N", help="seconds per measurement"
    )


def run(arguments: argparse.Namespace) -> None:
    check_writable(arguments.out)
    import json
    from dataclasses import replace

    import torch

    from ..._compat.torch_device import ACCELERATOR, accelerators, is_accelerator
    from ...cli.ranks import run_ranks
    from ...cost.model.machines_known import find_machine
    from ..bench.collectives import measure
    from .calibrate import GPU_SIZES, Sizes, calibrate

    if not 0 < arguments.seconds <= 5:
        raise ConfigError(
            f"--seconds {arguments.seconds:g} is invalid: use more than 0 and at most 5 seconds"
        )
    device = torch.device(ACCELERATOR, 0) if accelerators().is_available() else torch.device("cpu")
    reference = None if arguments.like is None else find_machine(arguments.like)
    world = arguments.processes or max(2, accelerators().device_count())
    working("measuring")
    links = None
    if (
        world > 1
        and reference is None
        and (device.type == "cpu" or accelerators().device_count() > 1)
    ):
        measured = run_ranks(world, measure, list(_SIZES), arguments.seconds / 20)
        reduced = sorted(
            (measurement for measurement in measured if measurement.collective == "all-reduce"),
            key=lambda each: each.size,
        )
        links = reduced[-1].bus_bandwidth, reduced[0].seconds
    sizes = replace(GPU_SIZES if is_accelerator(device) else Sizes(), seconds=arguments.seconds)
    document = calibrate(arguments.name, device, links, sizes, reference)
    if arguments.out is None:
        print_json(document)
    else:
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.out}")
