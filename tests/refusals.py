"""What a call says that ought to be refused."""

from collections.abc import Callable
from typing import Any

from hfscale import ConfigError


def refusal_of(call: Callable[[], Any]) -> str:
    """The words of its :class:`hfscale.ConfigError`, or ``"accepted"``."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return "accepted"
