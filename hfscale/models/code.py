"""Read facts from the source of a stock class that its config does not hold."""

import inspect
from typing import Any

from torch import nn

_LOSSES = {"CrossEntropyLoss", "cross_entropy", "NLLLoss", "nll_loss"}


def has_own_loss(model: nn.Module, head: nn.Module | None = None) -> bool:
    """Return whether the forward of a model, or of a module around ``head``, takes a cross entropy of its own."""
    around = (m for m in model.modules() if m is model or any(child is head for child in m.children()))
    names = {name for module in around for name in used_names(type(module))}
    return "loss_function" not in names and bool(names & _LOSSES)


def used_names(kind: type[Any]) -> tuple[str, ...]:
    """Return the names that a class's forward uses, and then those in its own methods that it uses."""
    found: dict[str, None] = {}
    waiting = ["forward"]
    while waiting:
        method = inspect.getattr_static(kind, waiting.pop(), None)
        code = getattr(inspect.unwrap(method), "__code__", None) if inspect.isfunction(method) else None
        new = [name for name in _names_in(code) if name not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return tuple(found)


def _names_in(code: Any) -> list[str]:
    """Return the names that a code object uses, and those of the comprehensions in it."""
    inner = (each for each in getattr(code, "co_consts", ()) if inspect.iscode(each))
    return [*getattr(code, "co_names", ()), *(name for each in inner for name in _names_in(each))]


def looks_up_like_stock(embedding: nn.Embedding) -> bool:
    """Return whether a lookup is ``nn.Embedding``'s own, possibly scaled."""
    forward = type(embedding).forward
    return forward is nn.Embedding.forward or "super().forward(" in inspect.getsource(forward)


def scores_by_sigmoid(router: nn.Module) -> bool:
    """Return whether a router computes scores with a sigmoid, and never with a softmax."""
    code = getattr(inspect.unwrap(type(router).forward), "__code__", None)
    names = set(code.co_names) if code is not None else set()
    return "sigmoid" in names and "softmax" not in names
