"""Undo stock Trainer's scaling of losses that are not divided by the number of labels of a step.

Over N data ranks, stock Trainer multiplies each loss by N if the model's ``forward`` accepts any keyword arguments,
because it assumes that the loss was divided by ``num_items_in_batch`` of all ranks. A class may accept this number
without dividing by it (audio classifiers, custom losses). Then its loss and gradients would be N times the values of
one process.

So each forward pass gets a number that records whether anything was computed with it::

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
    """Wrap a number that records when it is used in a computation; moving or casting the number does not count as a
    use.
    """

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
        """Compute with the plain number, and record the use; showing the number in logs is no use."""
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


def was_used(number: Any) -> bool:
    """Return whether a number that records its uses has been used in a computation so far."""
    return isinstance(number, Noticed) and bool(number.notes)


class _WasUsed:
    """Convert to ``True`` if a number has been used in a computation so far."""

    def __init__(self, number: Noticed) -> None:
        self._number = number

    def __bool__(self) -> bool:
        return was_used(self._number)


@contextmanager
def evaluated_as_trained(trainer: Any) -> Iterator[list[bool]]:
    """Inside the ``with`` block, let Trainer's own evaluation multiply a loss by the number of data ranks only if the
    loss was divided by the labels of all data ranks, as in training (:func:`scaled_if_divided`). Yield a list to which
    each loss appends whether it was divided by them.
    """
    compute = trainer.compute_loss
    divided: list[bool] = []

    def scaled(*args: Any, num_items_in_batch: Any = None, **options: Any) -> Any:
        with scaled_if_divided(trainer.args, num_items_in_batch) as items:
            loss = compute(*args, num_items_in_batch=items, **options)
        divided.append(was_used(items))
        return loss

    with attribute_replaced(trainer, "compute_loss", scaled):
        yield divided


@contextmanager
def scaled_if_divided(arguments: Any, items: Any) -> Iterator[Any]:
    """Yield the ``num_items_in_batch`` to pass to Trainer's own step. Trainer then multiplies the loss by the number of
    data ranks only if the loss was computed with this number.
    """
    if not isinstance(items, Tensor) or not arguments.average_tokens_across_devices:
        yield items
        return
    noticed = Noticed.wrap(items.detach().clone())
    with attribute_replaced(arguments, "average_tokens_across_devices", _WasUsed(noticed)):
        yield noticed
