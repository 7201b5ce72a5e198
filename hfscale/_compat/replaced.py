"""Replace attributes, and entries of dicts, temporarily."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Set ``owner.name`` to ``value``, and yield it, for the ``with`` block; restore it, or delete it if inherited."""
    was_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield value
    finally:
        if was_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def entries_replaced(entries: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Set each ``dict[key]``, which is there, to a value inside the ``with`` block; then restore them."""
    before = [(held, key, held[key], value) for held, key, value in entries]
    for held, key, _, value in before:
        held[key] = value
    try:
        yield
    finally:
        for held, key, value, _ in before:
            held[key] = value
