"""Hash the stock code of a model's classes, so that what was proved for these classes stays valid in any release of
transformers with the same code.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).with_name("sources.json")
"""File with, for each family of hfscale's own table, the hashes of the stock sources for which
``scripts/prove_entries.py`` proved the table's entry: two tensor ranks compute the same as one process.
"""

_FAMILIES = "transformers.models."
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source_hash(kinds: Iterable[type]) -> str:
    """Return a hash of the modeling files of all families in which ``kinds`` (classes of models or configs) are
    defined.

    Comments, docstrings and blank lines do not count. Code that all families use (masks, caches, losses) is left out,
    since it changes with every release; whatever depends on it is proved for each release (``scripts/prove_facts.py``).
    """
    folders = {folder for kind in kinds for folder in _family_folders(kind)}
    hashes = sorted(_folder_hash(folder) for folder in folders)
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def short_hash(kind: type) -> str:
    """Return the hash of the source of one class, in the short form of ``sources.json``."""
    return source_hash([kind])[:12]


def is_proved_source(family: str, kind: type) -> bool:
    """Return whether the entry of ``family`` in hfscale's own table was proved, by two tensor ranks that equal one
    process, with the same source of the class ``kind`` as in the installed transformers.
    """
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
    """Return the lines of a file without comments, docstrings and blank lines."""
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
