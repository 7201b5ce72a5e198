"""The ``hfscale`` command: one file per subcommand. No file imports torch before its subcommand runs."""

import argparse
import difflib
import sys
import textwrap
import traceback
from importlib import import_module
from types import TracebackType
from typing import Any

from .. import __version__
from ..config.declared import declared
from ..config.layout import LayoutFields, check_name
from ..errors import ConfigError, HFScaleError, check_count, meant
from ..extensions import added, provided
from .model_flags import bytes_of, check_place, tokens_of
from .parser import Parser

_NAMES = (
    "train",
    "plan",
    "estimate",
    "search",
    "verify",
    "blueprint",
    "convert",
    "inspect",
    "merge",
    "doctor",
    "completion",
)
_COMMANDS = {name: import_module(f".cmd_{name}", __name__) for name in _NAMES}
_COMMANDS |= {name: provided("commands", name) for name in sorted(added("commands"))}
"""Subcommands by name: modules, described by their docstrings, with ``HELP``, ``EXAMPLE``, ``add_arguments(parser)``
and ``run(arguments)``, which returns an exit code, or ``None`` for 0. A module's optional ``COUNTS`` names further
flags that take a count; its optional ``JSON = False`` leaves out the flag ``--json``."""

_EXAMPLES = """examples:
  hfscale plan Qwen/Qwen3-8B --tp 2 --dp-shard 4
  hfscale train demo_pretrain
  hfscale COMMAND --help"""
_COUNTS = (
    "batch_size",
    "accumulate",
    "gpus",
    "processes",
    "microbatches",
    "virtual_stages",
    "powersgd_rank",
    "rank",
    "steps",
    "width",
    "gpus_per_node",
)
_TOKENS = ("sequence_length", "tokens", "tokens_per_step", "its_tokens_per_step")
_AMOUNTS = dict.fromkeys(_TOKENS, tokens_of) | dict.fromkeys(
    ("max_memory", "max_shard_size"), bytes_of
)
"""Map the name of each flag that takes a number of tokens, or a size in bytes, to the function by which
:func:`check_early` converts it to a number.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv``, by default that of the process. Return the exit code: 0 for success, 1 if a check
    failed, 2 if the command is impossible.

    Errors of hfscale are printed without a traceback. Without ``argv`` (as in the installed command), so is any other
    exception, unless ``--debug`` is given.
    """
    try:
        arguments = _parse(argv)
    except SystemExit as stop:  # argparse has printed the help, the version or an error
        return int(stop.code or 0)
    # The ranks of ``hfscale train`` keep their tracebacks, which belong in logs.
    if argv is None and not arguments.debug and arguments.command != "train":
        sys.excepthook = _in_a_line
    try:
        check_early(arguments)
        return int(_COMMANDS[arguments.command].run(arguments) or 0)
    except HFScaleError as error:
        if arguments.debug:
            raise
        print(f"hfscale {arguments.command}: {error}", file=sys.stderr)
        return 2


def _in_a_line(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception in one line instead of a traceback; installed as ``sys.excepthook``."""
    if issubclass(kind, KeyboardInterrupt):
        print("hfscale: interrupted", file=sys.stderr)
        return
    frames = traceback.extract_tb(trace)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    reason = str(error).strip().partition("\n")[0]
    print(
        f"hfscale: {kind.__name__}: {reason}{place}\nUnexpected error: run again with --debug, and report the "
        "traceback",
        file=sys.stderr,
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    given = sys.argv[1:] if argv is None else argv
    if not given:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if not given[0].startswith("-") and given[0] not in _COMMANDS:
        close = difflib.get_close_matches(given[0], _COMMANDS, n=1) or [
            "hfscale --help, which lists them"
        ]
        parser.error(f"invalid choice: {given[0]!r} is no command (did you mean {close[0]}?)")
    arguments, rest = parser.parse_known_args(given)
    # argparse gives all positionals to the first group, so key=value after a flag is left over in ``rest``.
    if any(text.startswith("-") or "=" not in text for text in rest) or (
        rest and "overrides" not in arguments
    ):
        _refuse(arguments.commands[arguments.command], rest)
    if rest:
        arguments.overrides.extend(rest)
    return arguments


def _refuse(parser: Parser, rest: list[str]) -> None:
    """Exit with an error about the unrecognized arguments ``rest`` of a subcommand, and suggest the most similar
    flag.
    """
    unknown = next((text for text in rest if text.startswith("-")), rest[0])
    close = (
        meant(unknown.partition("=")[0], parser.flags(), 0.75) if unknown.startswith("-") else None
    )
    parser.error(
        f"unrecognized arguments: {' '.join(rest)}" + (f" (did you mean {close}?)" if close else "")
    )


def _parser() -> Parser:
    listed = [
        textwrap.fill(command.HELP, 100, initial_indent=f"  {name:15}", subsequent_indent=" " * 17)
        for name, command in _COMMANDS.items()
    ]
    parser = Parser(
        prog="hfscale",
        description="Train stock Hugging Face models at any scale.",
        epilog="\n".join(["commands:", *listed, "", _EXAMPLES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hfscale {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made: dict[str, Parser] = {}
    for name, command in _COMMANDS.items():
        made[name] = commands.add_parser(
            name,
            description=textwrap.fill(command.__doc__ or "", 100),
            epilog="example:\n" + textwrap.indent(command.EXAMPLE, "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(made[name])
        if getattr(command, "JSON", True):
            made[name].add_argument(
                "--json", action="store_true", help="print JSON instead of text"
            )
        made[name].add_argument("--debug", action="store_true", help="show tracebacks of errors")
    parser.set_defaults(commands=made)
    return parser


def check_early(arguments: argparse.Namespace) -> None:
    """Refuse impossible arguments before torch is imported, which takes seconds. Replace sizes and counts of tokens,
    such as ``60GB`` and ``4M``, by numbers.
    """
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if "model" in given:
        check_place(given["model"])
    for field in declared(LayoutFields):
        if field.dest in given and field.name.endswith("_size"):
            check_count(field.name, _number(given[field.dest]))
        elif field.dest in given and field.choices:
            check_name(field, given[field.dest])
    counts = {
        *_COUNTS,
        *getattr(_COMMANDS.get(given.get("command", "")), "COUNTS", ()),
    }
    for name in given.keys() & counts:
        check_count(_flag(name), _number(given[name]))
    for name in given.keys() & _AMOUNTS.keys():
        if isinstance(given[name], str):
            setattr(arguments, name, _AMOUNTS[name](given[name], _flag(name)))
    if "auto_class" in given and not str(given["auto_class"]).startswith("AutoModel"):
        raise ConfigError(
            f"--auto-class {given['auto_class']} is not one of transformers' Auto classes: use AutoModelForCausalLM"
        )
    if "hardware" in given:
        from ..cost.model.machines_known import find_machine

        find_machine(given["hardware"])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(given: Any) -> Any:
    return int(given) if isinstance(given, str) and given.isdigit() else given
