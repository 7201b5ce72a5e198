"""Call a user's loss function on the rank that has the head, and report its errors on every rank."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from .runtime import Runtime

Value = TypeVar("Value")


class UserFunction:
    """A user's function whose failure on one rank does not leave other ranks waiting.

    A rank on which it failed continues with a value that counts nothing, until all ranks meet at the end of the step.

    Args:
        name: name of the argument that it was passed as.
        arguments: names of the arguments that it is called with.

    Raises:
        ConfigError: it cannot be called with them.
    """

    def __init__(self, runtime: Runtime, name: str, function: Any, arguments: tuple[str, ...]) -> None:
        if not callable(function) or not _takes(function, len(arguments)):
            raise ConfigError(f"{name}={function!r} is impossible: pass a function of {' and '.join(arguments)}")
        self.name, self._runtime, self._function = name, runtime, function
        self._error: Exception | None = None

    def __call__(self, read: Callable[[Any], Value], *args: Any, instead: Value) -> Value:
        """Return ``read(function(*args))``; ``instead`` if one of the two raises."""
        try:
            return read(self._function(*args))
        except Exception as error:  # of any type: it is raised in `agree`
            self._error = self._error or error
            return instead

    def agree(self) -> None:
        """Raise on every rank if the function failed on one; collective."""
        error, control = self._error, self._runtime.mesh.control
        failed = torch.tensor([int(error is not None)])
        if control is not None:
            dist.all_reduce(failed, group=control)
        if error is not None:
            raise error
        if failed:
            raise ConfigError(f"{self.name} failed on {int(failed)} other rank(s): see their error")

    def scalar(self, value: Any, what: str) -> Tensor:
        """Return a loss as a scalar tensor.

        Raises:
            ConfigError: it is not a floating-point tensor of one number.
        """
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            given = f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)[:60]
            raise ConfigError(f"{self.name} must return {what} as a tensor of one number, got {given}: use .sum()")
        return value.reshape(())


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # compiled functions may have no signature
        return True
    return True
