"""Undo what stock Trainer does to losses that do not divide by the labels of a step.

Over N data ranks stock Trainer multiplies by N each loss of a model whose ``forward`` takes any keyword arguments, for
its division by ``num_items_in_batch`` of all ranks. A class may take the number and not divide by it (classifiers of
sound, a loss of its own): then its loss and gradients are N times those of one process.

So the number that a pass gets tells whether anything was computed with it::

    model(**inputs, num_items_in_batch=Noticed(n))    loss / n      noticed: multiplied by N, as in stock code
                                                      mean(losses)  not noticed: left alone
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import recursively_apply
from torch import Tensor

from ..._compat.replaced import attribute_replaced

_MOVES = frozenset(
    {"to", "cpu", "float", "double", "long", "int", "type", "detach", "clone", "reshape", "view"}
)
_LOOKS = frozenset(
    {"__get__", "size", "dim", "numel", "is_floating_point", "__repr__", "__format__"}
)


class Noticed(Tensor):
    """A number that notices being computed with; moved or cast, it is still the same number."""

    notes: list[str]

    @classmethod
    def wrap(cls, number: Tensor, notes: list[str] | None = None) -> "Noticed":
        """Return ``number`` with a list of the functions that have used it."""
        made = number.as_subclass(cls)
        made.notes = [] if notes is None else notes
        return made

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with the plain number, and note it; logs may show the number."""
        held: list[Noticed] = []

        def plain(number: Noticed) -> Tensor:
            held.append(number)
            return number.as_subclass(Tensor)

        given, options = recursively_apply(
            plain, (tuple(args), dict(kwargs or {})), test_type=_is_noticed
        )
        result = function(*given, **options)
        name = function.__name__
        if name in _LOOKS:
            return result
        if name in _MOVES and isinstance(args[0], cls):
            return cls.wrap(result, args[0].notes)
        for number in held:
            number.notes.append(name)
        return result


def _is_noticed(value: Any) -> bool:
    return isinstance(value, Noticed)


class _WasUsed:
    """Be true once a number has been used."""

    def __init__(self, number: Noticed) -> None:
        self._number = number

    def __bool__(self) -> bool:
        return bool(self._number.notes)


@contextmanager
def evaluated_as_trained(trainer: Any) -> Iterator[list[bool]]:
    """Scale losses of a stock evaluation, in the `with` block, as those of :func:`scaled_if_divided`; yield a list to
    which each loss adds whether it divides by the labels of all data ranks.
    """
    compute = trainer.compute_loss
    divided: list[bool] = []

    def scaled(*args: Any, num_items_in_batch: Any = None, **options: Any) -> Any:
        with scaled_if_divided(trainer.args, num_items_in_batch) as items:
            loss = compute(*args, num_items_in_batch=items, **options)
        divided.append(isinstance(items, Noticed) and bool(items.notes))
        return loss

    with attribute_replaced(trainer, "compute_loss", scaled):
        yield divided


@contextmanager
def scaled_if_divided(arguments: Any, items: Any) -> Iterator[Any]:
    """Yield ``num_items_in_batch`` for a stock step, whose loss is scaled only if that number is computed with."""
    if not isinstance(items, Tensor) or not arguments.average_tokens_across_devices:
        yield items
        return
    noticed = Noticed.wrap(items.detach().clone())
    with attribute_replaced(arguments, "average_tokens_across_devices", _WasUsed(noticed)):
        yield noticed
