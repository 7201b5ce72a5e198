"""Make question-answer pairs from the docstrings of Python modules."""

import ast
import random
import warnings
from collections.abc import Iterator


def questions(path: str, source: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, question and answer, the docstring's first paragraph, for each documented public function and method
    of a module; nothing if ``path``, as ``asyncio/events.py``, is private or ``source`` is not Python of this version.
    """
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    if any(part.startswith("_") for part in parts):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's strings
            tree = ast.parse(source)
    except SyntaxError:
        return
    seen = set()
    for name, docstring in _documented(tree, ".".join(parts)):
        answer = " ".join(docstring.split("\n\n")[0].split())
        if answer and name not in seen:  # some are defined once per operating system
            seen.add(name)
            yield name, f"What does {name} do?", answer


def disordered(text: str) -> str:
    """Return the words of a text in another, fixed order: the rejected text of a pair."""
    words = text.split()
    random.Random(text).shuffle(words)
    return " ".join(words)


def _documented(owner: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    for node in owner.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _documented(node, name)
        elif docstring := ast.get_docstring(node):
            yield name, docstring
