"""Declare options once: each field of a config class becomes a command-line flag and a recipe key."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from inspect import getdoc
from typing import Any, get_args

from ..errors import ConfigError, meant

# Endings of the names of Accelerate's fields that error messages do not suggest
_UNUSED = ("_handler", "_backend", "sp_size")


def setting(
    default: Any = None,
    *,
    choices: Sequence[str] | Callable[[], Sequence[str]] = (),
    flag: str = "",
    needs: str = "",
) -> Any:
    """Declare a field that is ``None`` until it is filled from an environment variable or with ``default``.

    Args:
        default: value if neither the user nor the environment sets the field.
        choices: the names that the field accepts, or a function that returns them, if extensions may add names.
        flag: name of the command-line flag; by default the field's name without ``_size``.
        needs: the parallel axis that must be larger than 1 for the field to have an effect.
    """
    return field(
        default=None,
        metadata={"default": default, "given_choices": choices, "flag": flag, "needs": needs},
    )


class Spelled:
    """Base class of configs that refuses misspelled field names: it raises :class:`ConfigError` with a suggestion,
    where ``__init__`` would raise a ``TypeError``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise :class:`ConfigError` for field names that the config does not have."""
        names = [option.name for option in fields(cls)]  # type: ignore[arg-type]
        useful = [name for name in names if not name.endswith(_UNUSED)]
        if unknown := [name for name in kwargs if name not in names]:
            close = meant(unknown[0], useful)
            hint = f"; did you mean {close!r}?" if close else "."
            raise ConfigError(
                f"{cls.__name__} has no field {unknown[0]!r}{hint} Its fields are {', '.join(useful)}"
            )
        return super().__new__(cls)


@dataclass(frozen=True)
class Declared:
    """Describe one field of a config class as a command-line flag: name, help text, default, choices."""

    name: str  # name of the field
    flag: str  # the command-line flag, like ``--tp``
    text: str  # the first clause of the field's description, without citations
    default: Any  # default of the field, or of :func:`setting`
    given_choices: Sequence[str] | Callable[[], Sequence[str]]
    needs: str  # the parallel axis that must be larger than 1 for the field to have an effect
    kind: type  # ``bool``, ``int``, ``str``, or ``object`` for any other type

    @property
    def choices(self) -> Sequence[str]:
        """The names that the field accepts as values; empty if its values are not names."""
        return self.given_choices() if callable(self.given_choices) else self.given_choices

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments (``argparse.Namespace``) that has the value of this field's flag."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def help(self) -> str:
        """The help text of the flag: description, choices and default."""
        needs = f"with --{self.needs}: " if self.needs else ""
        choices = f": {', '.join(self.choices)}" if self.choices else ""
        default = f" (default: {self.default})" if self.choices else ""
        return f"{needs}{self.text}{choices}{default}".replace("%", "%%")


@cache
def declared(cls: type) -> tuple[Declared, ...]:
    """Return the fields of a config dataclass as command-line flags, whose help texts come from the class's
    docstring.
    """
    texts = described(cls)
    options = []
    for option in fields(cls):
        more = {
            "default": option.default,
            "given_choices": (),
            "flag": "",
            "needs": "",
            **option.metadata,
        }
        flag = more.pop("flag") or option.name.removesuffix("_size")
        kinds = [kind for kind in (bool, int, str) if kind in (option.type, *get_args(option.type))]
        kind = kinds[0] if len(kinds) == 1 else object
        clause = re.split(
            r"[.;:](?:\s|$)|\s\(", texts.get(option.name, "").replace("``", ""), maxsplit=1
        )[0]
        options.append(
            Declared(option.name, f"--{flag.replace('_', '-')}", clause, **more, kind=kind)
        )
    return tuple(options)


def described(cls: type) -> dict[str, str]:
    """Return the description of each field, from the ``Args`` or ``Attributes`` section of a config class's
    docstring.
    """
    section = re.search(r"(?ms)^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", getdoc(cls) or "")
    entries = re.split(r"(?m)^    (?=\w+: )", section[1])[1:] if section else []
    return {
        name: " ".join(text.split())
        for name, _, text in (entry.partition(": ") for entry in entries)
    }
