"""Replace attributes, and entries of dicts, temporarily."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Set ``owner.name`` to ``value``, and yield ``value``; at the end of the ``with`` block restore the attribute, or
    delete it if ``owner`` had only inherited it.
    """
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
    """Set each existing entry ``dict[key]`` to a value inside the ``with`` block; restore the entries at its end."""
    before = [(held, key, held[key], value) for held, key, value in entries]
    for held, key, _, value in before:
        held[key] = value
    try:
        yield
    finally:
        for held, key, value, _ in before:
            held[key] = value
