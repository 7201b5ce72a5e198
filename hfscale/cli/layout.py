"""Flags that describe a layout."""

import argparse
from typing import TYPE_CHECKING, Any

from ..config.schedules import SCHEDULES
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.parallel import ParallelConfig

SIZES = {
    "--tp": "tensor ranks: each layer's matrices are cut",
    "--dp-shard": "sharded-data ranks (ZeRO-3, FSDP2)",
    "--dp-replicate": "replicas of the whole sharded model",
    "--pp": "pipeline stages",
    "--ep": "expert ranks, which are ranks of tp and of the data axes: whole experts on each",
    "--expert-tp": "1 (whole experts) or tp: ranks over which each expert is cut besides, with --ep",
    "--cp": "context ranks: every sequence is cut, and attention reads all of it",
}
"""Flags of the axes, with their help."""

# Flag -> field of the layout, metavar, help.
_PIPELINE = {
    "--schedule": ("pipeline_schedule", "NAME", f"with --pp: {', '.join(SCHEDULES)}, or a .csv file (default: 1f1b)"),
    "--microbatches": ("num_microbatches", "N", "with --pp: microbatches of one step"),
    "--virtual-stages": ("virtual_stages", "N", "with --pp: stages per pipeline rank"),
    "--stage-layers": ("stage_layers", "N,N,...", "with --pp: layers of each stage (default: balanced by cost)"),
}


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the axes, of sequence parallelism and of pipelines."""
    # Values stay strings here: ParallelConfig checks them, and fills in those left out.
    layout = parser.add_argument_group("layout")
    for flag, text in SIZES.items():
        layout.add_argument(flag, metavar="N", help=text)
    layout.add_argument(
        "--sequence-parallel", action="store_true", default=None, help="cut norms and residuals over tp"
    )
    layout.add_argument(
        "--cp-method", metavar="NAME", help="with --cp: auto, gather, heads, ring or heads_ring (default: auto)"
    )
    for flag, (_, metavar, text) in _PIPELINE.items():
        layout.add_argument(flag, metavar=metavar, help=text)


def layout_of(arguments: argparse.Namespace) -> "ParallelConfig":
    """Return the layout that the flags describe.

    Raises:
        ConfigError: a value is impossible in itself, or does not fit the schedule.
    """
    from ..config.parallel import ParallelConfig
    from ..parallel.pipeline.orders import check

    def of(flag: str) -> str | None:
        value: str | None = getattr(arguments, flag[2:].replace("-", "_"))
        return value

    sizes: dict[str, Any] = {f"{flag[2:].replace('-', '_')}_size": of(flag) for flag in SIZES}
    pipeline: dict[str, Any] = {name: of(flag) for flag, (name, _, _) in _PIPELINE.items()}
    others = {name: getattr(arguments, name) for name in ("cp_method", "sequence_parallel")}
    layout = ParallelConfig(**sizes, **pipeline, **others)
    pp_size, schedule = layout.pp, str(layout.pipeline_schedule)
    given = [flag for flag in _PIPELINE if of(flag) is not None]
    if pp_size == 1 and given:
        raise ConfigError(f"{', '.join(given)} is about pipeline stages, and there is one: give --pp 2 or more as well")
    if pp_size > 1 and not schedule.endswith(".csv"):
        check(schedule, pp_size, layout.num_microbatches or 2 * pp_size, int(layout.virtual_stages or 1))
    return layout
