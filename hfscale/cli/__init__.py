"""The ``hfscale`` command: one file per subcommand, none of which imports torch before it runs."""

import argparse
import sys
import textwrap
from types import ModuleType

from ..errors import HFScaleError
from ..version import __version__
from . import blueprint, convert, inspect, merge, plan, schedule, train, verify

_COMMANDS: dict[str, ModuleType] = {
    "train": train,
    "plan": plan,
    "verify": verify,
    "blueprint": blueprint,
    "schedule": schedule,
    "convert": convert,
    "inspect": inspect,
    "merge": merge,
}
"""Each module has ``HELP``, ``DESCRIPTION``, ``EXAMPLE``, ``add_arguments(parser)`` and ``run(arguments)``."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0, 1 where a check failed, 2 where it cannot be carried out."""
    try:
        arguments = _parse(argv)
    except SystemExit as stop:  # argparse has printed the help, the version or what is wrong
        return int(stop.code or 0)
    try:
        return int(_COMMANDS[arguments.command].run(arguments))
    except HFScaleError as error:
        print(f"hfscale {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes all positionals at the first, so that key=value behind a flag is left over.
    if any(text.startswith("-") or "=" not in text for text in rest) or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides.extend(rest)
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hfscale", description="Train stock Hugging Face models at any scale.")
    parser.add_argument("--version", action="version", version=f"hfscale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        command.add_arguments(
            commands.add_parser(
                name,
                help=command.HELP,
                description=textwrap.fill(command.DESCRIPTION, 100),
                epilog="example:\n" + textwrap.indent(command.EXAMPLE, "  "),
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parser
