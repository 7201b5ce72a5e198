"""Explain errors of transformers about configs, and models built from them, in our own words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from ...errors import ConfigError, HFScaleError
from .classes import classes_by_config


@contextmanager
def made_or_explained(source: str) -> Iterator[None]:
    """Raise ConfigError with the reason if reading a config of ``source`` fails inside the ``with`` block."""
    try:
        yield
    except ArithmeticError as error:  # division by a size of 0
        raise ConfigError(f"no config could be made of {source}: one of its sizes is 0 ({error})") from error
    except StrictDataclassError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        kind, _, words = reason.partition(": ")
        raise ConfigError(f"{source} is invalid: {words if kind.endswith('Error') else reason}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"no config could be read from {source}: {reason}") from error


@contextmanager
def built_or_explained(auto_class: Any, config: Any, *others: type[Exception]) -> Iterator[None]:
    """Raise ConfigError for a ValueError, or ``others``, of building a model inside the ``with`` block."""
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
    """Return the names of transformers' Auto classes of models."""
    return [name for name in dir(transformers) if name.startswith("AutoModel")]


def _classes(auto_class: str) -> Any:
    """Return the classes that an Auto class builds, by class of config."""
    return classes_by_config(getattr(transformers, auto_class))
