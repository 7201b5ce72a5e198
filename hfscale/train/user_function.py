"""A loss function of the user's own, which is called where the model's head is, and whose errors reach every rank."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from ..runtime import Runtime

Value = TypeVar("Value")


class UserFunction:
    """Call a function without leaving other ranks waiting where it fails.

    A rank on which it failed goes on with a value that counts nothing, until all ranks meet at the end of the step.

    Args:
        name: of the argument.
        arguments: that it is called with.

    Raises:
        ConfigError: it cannot be called with them.
    """

    def __init__(self, runtime: Runtime, name: str, function: Any, arguments: tuple[str, ...]) -> None:
        if not callable(function) or not _takes(function, len(arguments)):
            raise ConfigError(f"{name}={function!r} is impossible: pass a function of {' and '.join(arguments)}")
        self.name, self._runtime, self._function = name, runtime, function
        self._error: Exception | None = None

    def __call__(self, read: Callable[[Any], Value], *args: Any, instead: Value) -> Value:
        """Return what ``read`` makes of the function's result; ``instead`` where one of them fails."""
        try:
            return read(self._function(*args))
        except Exception as error:  # of any type: it is raised in `agree`
            self._error = self._error or error
            return instead

    def agree(self) -> None:
        """Raise on every rank where the function failed on one; collective."""
        error, control = self._error, self._runtime.mesh.control
        failed = torch.tensor([int(error is not None)])
        if control is not None:
            dist.all_reduce(failed, group=control)
        if error is not None:
            raise error
        if failed:
            raise ConfigError(f"{self.name} failed on {int(failed)} other rank(s): see their error")

    def scalar(self, value: Any, what: str) -> Tensor:
        """Return a loss, which must be a tensor of one number.

        Raises:
            ConfigError: it is not.
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
