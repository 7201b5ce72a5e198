"""Set gradients aside while a step makes new ones, and add them back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def gradients_aside(parameters: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Clear the gradients of ``parameters`` inside the `with` block; yields the old ones, for :func:`add_back`.

    If the block fails, the old gradients are restored.
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
    """Add the old gradient from :func:`gradients_aside` to that of ``parameter``, in the old one's memory."""
    if before is not None:
        parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
