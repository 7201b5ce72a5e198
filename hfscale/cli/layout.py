"""Flags that describe a layout, made from its fields."""

import argparse
from typing import TYPE_CHECKING

from ..config.declared import declared
from ..config.layout import LayoutFields
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..config.parallel import ParallelConfig


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
