"""Replace attributes temporarily."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Set ``owner.name`` to ``value``, and yield it, for the ``with`` block; restore it, or delete it if inherited."""
    was_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield value
    finally:
        if was_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
