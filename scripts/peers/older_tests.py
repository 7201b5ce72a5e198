"""Let tests of another release than the installed one be collected: names that are gone are put in their place.

What stands there raises as it is called, so a test that needs it fails with stock classes, and is not asked of ours.
"""

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any


class Gone:
    """A name that the installed release does not have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError("the installed release does not have this name")


@cache
def put_gone_names(path: Path, package: str) -> None:
    """Put :class:`Gone` where a test file imports from ``package`` what is not there; what asks answers no."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            not isinstance(node, ast.ImportFrom)
            or node.level
            or (node.module or "").split(".")[0] != package
        ):
            continue
        try:
            module = importlib.import_module(node.module or "")
        except ImportError:
            continue
        for alias in node.names:
            if not hasattr(module, alias.name):
                asks = alias.name.startswith("is_")
                setattr(module, alias.name, bool if asks else type(alias.name, (Gone,), {}))
