"""Set gradients aside while a step makes new ones, and add them back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def gradients_aside(parameters: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Within, ``parameters`` begin without gradients; gives what they had, for :func:`add_back`.

    A step that fails leaves the gradients that were there before it.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield before
    except BaseException:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        raise


def add_back(parameter: Tensor, before: Tensor | None) -> None:
    """Add to the gradient of ``parameter`` the one from :func:`gradients_aside`, in that one's memory."""
    if before is not None:
        parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
