"""Options that extensions add to optimizers: each makes steppers, which run behind the optimizer's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..extensions import added, provided
from ..train.runtime import Runtime
from .catalog import Options
from .sharded import Member, Stepper

_SLOT = "optimizer_options"


@dataclass(frozen=True)
class AddedOption:
    """An option of some optimizers, by name."""

    optimizers: tuple[str, ...]
    # A value as a user gives it, also as text -> what ``steppers`` takes.
    parse: Callable[[Any], Any]
    steppers: Callable[[Any, Sequence[Member], Runtime], list[Stepper]]
    """Makes what steps behind the optimizer, from the value and all members that the optimizer steps."""


Added = dict[str, tuple[AddedOption, Any]]  # option -> what it is, and its value


def split_options(optimizer: str, given: Options) -> tuple[Options, Added]:
    """Split options into an optimizer's own and those that extensions add to it, which are parsed."""
    own = dict(given)
    taken: Added = {}
    for name in given.keys() & added(_SLOT):
        option: AddedOption = provided(_SLOT, name)
        if optimizer in option.optimizers:
            try:
                taken[name] = (option, option.parse(own.pop(name)))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{optimizer!r}: {name}={given[name]!r} cannot be read: {error}"
                ) from error
    return own, taken
