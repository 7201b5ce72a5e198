"""Split off the options that extensions add to optimizers. Each option makes steppers (objects that update parameters)
that run after the optimizer's own steppers.
"""

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
    """Describe an option that an extension adds to some optimizers."""

    optimizers: tuple[str, ...]  # names of the optimizers that have the option
    # parses a user's value, which may be text
    parse: Callable[[Any], Any]
    steppers: Callable[[Any, Sequence[Member], Runtime], list[Stepper]]
    """Function that makes steppers (objects that update parameters) from the option's parsed value and all parameters
    of the optimizer. They run after the optimizer's own steppers.
    """


# Name of an option -> its description and its parsed value
Added = dict[str, tuple[AddedOption, Any]]


def split_options(optimizer: str, given: Options) -> tuple[Options, Added]:
    """Split the given options into the optimizer's own, and those that extensions add to it, with parsed values. Raise
    :class:`ConfigError` for values that cannot be parsed.
    """
    own = dict(given)
    taken: Added = {}
    for name in given.keys() & added(_SLOT):
        option: AddedOption = provided(_SLOT, name)
        if optimizer in option.optimizers:
            try:
                taken[name] = (option, option.parse(own.pop(name)))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"optimizer {optimizer!r} cannot read its option {name}={given[name]!r} ({error}): pass a value "
                    "of the right type"
                ) from error
    return own, taken
