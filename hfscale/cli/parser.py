"""The parser of a command line, which knows its arguments."""

import argparse
from typing import Any, NoReturn, Protocol


class Adds(Protocol):
    """A parser, or an argument group of one."""

    def add_argument(self, *flags: str, **options: Any) -> argparse.Action:
        """Add an argument."""


class Parser(argparse.ArgumentParser):
    """A parser that prints an error in one line, with a pointer to ``--help`` instead of the usage.

    Attributes:
        arguments: those added so far, in order, those of its groups included.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.arguments: list[argparse.Action] = []
        super().__init__(*args, **options)

    def add_argument(self, *flags: Any, **options: Any) -> argparse.Action:
        """Add an argument."""
        made = super().add_argument(*flags, **options)
        self.arguments.append(made)
        return made

    def add_argument_group(self, *args: Any, **options: Any) -> Any:
        """Add a group, whose arguments are the parser's too."""
        group: Any = super().add_argument_group(*args, **options)
        add = group.add_argument

        def noted(*flags: Any, **given: Any) -> argparse.Action:
            made: argparse.Action = add(*flags, **given)
            self.arguments.append(made)
            return made

        group.add_argument = noted
        return group

    def flags(self) -> dict[str, argparse.Action]:
        """Return flag -> argument, for flags that begin with two dashes."""
        return {
            flag: argument
            for argument in self.arguments
            for flag in argument.option_strings
            if flag.startswith("--")
        }

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\nsee {self.prog} --help\n")
