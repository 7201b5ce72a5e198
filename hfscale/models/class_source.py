"""Hash the stock code that a model's classes run, so that what is proved of it holds for any release that keeps it."""

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).with_name("sources.json")
"""For each family of hfscale's own table, the sources with which its entry was proved: ``scripts/prove_entries.py``."""

_FAMILIES = "transformers.models."
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source_hash(kinds: Iterable[type]) -> str:
    """Return a hash of the modeling files of the families that some classes, models or configs, are of.

    Comments, docstrings and blank lines do not count. Code that families share (masks, caches, losses) is left out: it
    changes with every release, and what it promises is proved release by release (``scripts/prove_facts.py``).
    """
    folders = {folder for kind in kinds for folder in _family_folders(kind)}
    hashes = sorted(_folder_hash(folder) for folder in folders)
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def short_hash(kind: type) -> str:
    """Return the source of one class as ``sources.json`` has it."""
    return source_hash([kind])[:12]


def is_proved_source(family: str, kind: type) -> bool:
    """Return whether the entry of a family was proved with the source that a class has in this transformers."""
    return short_hash(kind) in _proved_sources().get(family, ())


@cache
def _proved_sources() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(SOURCES.read_text())
    return found


def _family_folders(kind: type) -> Iterator[Path]:
    """Yield the folders of the families in which a class and its bases are defined."""
    for base in kind.__mro__:
        module = sys.modules.get(base.__module__)
        if base.__module__.startswith(_FAMILIES) and module is not None and module.__file__:
            yield Path(module.__file__).parent


@cache
def _folder_hash(folder: Path) -> str:
    files = sorted(folder.glob("modeling_*.py"))
    code = "\n".join(_without_comments(path.read_text(encoding="utf-8")) for path in files)
    return hashlib.sha256(f"{folder.name}\n{code}".encode()).hexdigest()


def _without_comments(text: str) -> str:
    """Return the lines of a file that compute something."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            documented.update(
                range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
            )
    lines = enumerate(text.splitlines(), start=1)
    kept = (line.rstrip() for number, line in lines if number not in documented)
    return "\n".join(line for line in kept if line and not line.lstrip().startswith("#"))
