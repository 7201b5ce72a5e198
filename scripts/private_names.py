"""Print the private names of other libraries that each file of ``hfscale/_compat`` reads, and how many there are.

    python scripts/private_names.py [DIRECTORY OF A SOURCE TREE]

Found in the sources: attributes and imports that begin with one underscore, private modules, methods of that kind that
a library calls in a class of ours, and strings of that kind. What a file defines itself is none.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_MODULE = re.compile(r"[\w.]*\._(?!_)[\w.]+")
_OURS = "_hfscale_"  # marks on others' objects


def private_names(root: Path = ROOT) -> dict[str, set[str]]:
    """Map each file below ``_compat`` to the names it reads: ``_name``, or ``private._module.name``."""
    compat = root / "hfscale" / "_compat"
    return {
        path.relative_to(compat).as_posix(): set(names_of(ast.parse(path.read_text())))
        for path in sorted(compat.rglob("*.py"))
    }


def names_of(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of others that a file reads."""
    own = set(_defined(tree))
    asked = _asked(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, value=value) if _is_private(name):
                if name not in own or _is_super(value):
                    yield name
            case ast.ImportFrom(module=str(module), level=0, names=names):
                for name in (each.name for each in names):
                    if _is_private(name) or _MODULE.fullmatch(f".{module}"):
                        yield f"{module}.{name}"
            case ast.Constant(value=str(text)) if text not in own:
                if _is_private(text) or (_MODULE.fullmatch(text) and not text.startswith(".")):
                    yield text
            case ast.ClassDef():
                yield from (name for name in _methods(node) if name not in asked)


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file gives: to functions, classes, variables, fields and attributes of ``self``."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                yield name


def _methods(kind: ast.ClassDef) -> list[str]:
    return [
        each.name
        for each in kind.body
        if isinstance(each, ast.FunctionDef) and _is_private(each.name)
    ]


def _asked(tree: ast.Module) -> set[str]:
    """Return the attributes that a file asks for, but for those of ``super()``."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not _is_super(node.value)
    }


def _is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None and not name.startswith(_OURS)


def _is_super(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "super"
    )


def main() -> None:
    """Print the names by file, and their number by library."""
    by_file = private_names(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    for file, names in by_file.items():
        if names:
            print(f"{file} ({len(names)}): {' '.join(sorted(names))}")
    every = {name.rpartition(".")[2] for names in by_file.values() for name in names}
    print(f"{len(every)} names")


if __name__ == "__main__":
    main()
