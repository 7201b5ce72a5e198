"""Configs, and models of them: what the host says of one that it cannot make, in a sentence of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from ...errors import ConfigError, HFScaleError
from .classes import classes_by_config


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


@contextmanager
def built_or_explained(auto_class: Any, config: Any, *others: type[Exception]) -> Iterator[None]:
    """Within, a model is built: where none can be, a :class:`~hfscale.ConfigError` says why.

    Args:
        others: errors that say so, besides ``ValueError``.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, HFScaleError) or not isinstance(error, (ValueError, *others)):
            raise
        reason = str(error).strip().partition("\n")[0]
        if not reason.startswith("Unrecognized configuration class"):
            raise ConfigError(
                f"no {config.model_type!r} model can be built of this config and these arguments: "
                f"{type(error).__name__}: {reason}"
            ) from error
        fitting = [name for name in auto_classes() if type(config) in (_classes(name) or ())]
        use = f"the Auto class {', '.join(fitting)}" if fitting else "another Auto class"
        kind = getattr(auto_class, "__name__", auto_class)
        raise ConfigError(f"{kind} cannot build a {config.model_type!r} model: use {use}") from error


def auto_classes() -> list[str]:
    """Return the names of the host's Auto classes of models."""
    return [name for name in dir(transformers) if name.startswith("AutoModel")]


def _classes(auto_class: str) -> Any:
    """Return class of config -> class of model."""
    return classes_by_config(getattr(transformers, auto_class))
