"""Time broadcast, reduce, all-reduce, gather, all-gather, scatter, reduce-scatter and all-to-all by message size, and
print the bus bandwidth. Measures between all GPUs of this machine over NCCL, or between CPU processes over gloo; if
started by a launcher, between the launched ranks, also on several machines.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...cli.look import check_drawing, check_writable, print_json, working
from ...cli.model_flags import bytes_of
from ...errors import ConfigError

if TYPE_CHECKING:
    from .collectives import Measured

HELP = "measure collectives by message size on this machine, and suggest a bucket size"
EXAMPLE = """hfscale bench collectives
hfscale bench collectives --processes 4 --sizes 64KiB,1MiB,16MiB --out collectives.png
accelerate launch --num_machines 2 ... -m hfscale bench collectives"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("collectives",), help="what to measure")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="ranks (default: one for each GPU, or 2)"
    )
    sizes = "4KiB,64KiB,512KiB,4MiB,32MiB"
    parser.add_argument(
        "--sizes", default=sizes, metavar="SIZE,...", help="message sizes (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw a picture: .png or .svg")


def run(arguments: argparse.Namespace) -> None:
    check_writable(arguments.out)
    sizes = [bytes_of(text, "--sizes") for text in arguments.sizes.split(",")]
    if arguments.processes is not None and arguments.processes < 2:
        raise ConfigError(
            f"--processes must be at least 2, got {arguments.processes}: give a larger number, or leave --processes out"
        )
    from .collectives import draw

    if arguments.out is not None:
        check_drawing(arguments.out)
    working("measuring")
    measured, where = _measured(sizes, arguments.processes)
    if not measured:  # another rank prints
        return
    if arguments.out is not None:
        draw(arguments.out, measured, f"collectives over {measured[0].ranks} ranks, {where}")
    _show(arguments, measured, where)


def _measured(sizes: list[int], processes: int | None) -> tuple[list["Measured"], str]:
    """Return the measurements and a description of the links; on other ranks than the first, no measurements."""
    import torch.distributed as dist

    from ..._compat.torch_device import accelerators
    from ...cli.ranks import run_ranks
    from ...config.environment import started_processes
    from ...distributed.processes import own_device, start
    from .collectives import measure

    if started_processes() > 1:
        device = own_device()
        if not dist.is_initialized():
            start(device)
        measured = measure(device, sizes)
        where = f"{dist.get_backend()} between the launcher's ranks"
        return (measured if dist.get_rank() == 0 else []), where
    gpus = accelerators().device_count()
    world = processes or max(2, gpus)
    measured = run_ranks(world, measure, sizes)
    return (
        measured,
        f"NCCL between {world} GPUs"
        if world <= gpus
        else f"gloo between {world} processes of one machine",
    )


def _show(arguments: argparse.Namespace, measured: Sequence["Measured"], where: str) -> None:
    from ...plan.columns import aligned
    from ...plan.table import human
    from .collectives import suggested_bucket

    bucket = suggested_bucket(measured)
    assert bucket is not None
    if arguments.json:
        entries = [
            {**asdict(measurement), "bus_bandwidth": measurement.bus_bandwidth}
            for measurement in measured
        ]
        print_json(
            {
                "where": where,
                "ranks": measured[0].ranks,
                "measured": entries,
                "bucket_bytes": bucket,
            }
        )
        return
    sizes = list(dict.fromkeys(measurement.size for measurement in measured))
    of = {(measurement.collective, measurement.size): measurement for measurement in measured}
    names = list(dict.fromkeys(measurement.collective for measurement in measured))
    rows = [
        [name, *(f"{of[name, size].bus_bandwidth / 1e9:.3f}" for size in sizes)] for name in names
    ]
    print(f"bus bandwidth in GB/s, {where}, by bytes of the message\n")
    print(
        *aligned(
            [["", *map(human, sizes)], *rows],
            left=(0,),
            ruled=True,
        ),
        sep="\n",
    )
    latency = min(of["all-reduce", size].seconds for size in sizes)
    print(
        f"\nan all-reduce takes {1e6 * latency:,.0f} us at least, and reaches from {human(bucket)} on 80% of its best "
        f"bandwidth:\nDDP(bucket_cap_mb={max(1, round(bucket / 2**20))}), and layers of about that size over data axes"
    )
    if arguments.out is not None:
        print(f"wrote {arguments.out}")
