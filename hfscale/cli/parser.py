"""Define a command-line parser that keeps a list of the arguments that were added to it."""

import argparse
from typing import Any, NoReturn, Protocol


class Adds(Protocol):
    """Any object with ``add_argument``: a parser, or an argument group of a parser."""

    def add_argument(self, *flags: str, **options: Any) -> argparse.Action:
        """Add an argument, like :meth:`argparse.ArgumentParser.add_argument`."""


class Parser(argparse.ArgumentParser):
    """A command-line parser that prints an error as one line and refers to ``--help`` instead of printing the usage.

    Attributes:
        arguments: all arguments added so far, in order, including those of argument groups.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.arguments: list[argparse.Action] = []
        super().__init__(*args, **options)

    def add_argument(self, *flags: Any, **options: Any) -> argparse.Action:
        """Add an argument, and record it in :attr:`arguments`."""
        made = super().add_argument(*flags, **options)
        self.arguments.append(made)
        return made

    def add_argument_group(self, *args: Any, **options: Any) -> Any:
        """Add an argument group; arguments added to this group are recorded in :attr:`arguments` too."""
        group: Any = super().add_argument_group(*args, **options)
        add = group.add_argument

        def noted(*flags: Any, **given: Any) -> argparse.Action:
            made: argparse.Action = add(*flags, **given)
            self.arguments.append(made)
            return made

        group.add_argument = noted
        return group

    def flags(self) -> dict[str, argparse.Action]:
        """Return the argument of each flag that begins with two dashes."""
        return {
            flag: argument
            for argument in self.arguments
            for flag in argument.option_strings
            if flag.startswith("--")
        }

    def error(self, message: str) -> NoReturn:
        """Print the error ``message`` in one line, refer to ``--help``, and exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\nsee {self.prog} --help\n")
