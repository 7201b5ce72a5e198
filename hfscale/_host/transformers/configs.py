"""Configs: what the host says of one that it cannot make, in a sentence of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError

from ...errors import ConfigError


@contextmanager
def made_or_explained(source: str) -> Iterator[None]:
    """Within, a config is read or made: an impossible one is a :class:`~hfscale.ConfigError` that says why.

    Args:
        source: what it is made of, for the message.
    """
    try:
        yield
    except ArithmeticError as error:  # of a size that divides another
        raise ConfigError(f"no config could be made of {source}: one of its sizes is 0 ({error})") from error
    except StrictDataclassError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        kind, _, words = reason.partition(": ")
        raise ConfigError(f"{source} is impossible: {words if kind.endswith('Error') else reason}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"no config could be read from {source}: {reason}") from error
