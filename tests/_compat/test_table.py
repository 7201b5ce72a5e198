"""Every private name that ``hfscale/_compat`` reads has a test beside this one, and no test is of a name it left."""

import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from . import relied_on

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "private_names.py"


@pytest.fixture(scope="module")
def table() -> list[relied_on.Promise]:
    package = importlib.import_module(__package__ or "")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return relied_on.TABLE


@pytest.fixture(scope="module")
def script() -> Any:
    found = importlib.util.spec_from_file_location("private_names", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def parts(promise: relied_on.Promise) -> set[str]:
    """The names in a promise: those of every module and attribute on the way."""
    return {
        part
        for name in promise.name.split(" or ")
        for part in (name, name.replace(":", "."), *re.split(r"[.:]", name))
    }


def test_every_private_name_has_a_test(table: Any, script: Any) -> None:
    tested: dict[str, set[str]] = {}
    for promise in table:
        tested.setdefault(promise.file, set()).update(parts(promise))
    read = script.private_names()
    missing = {
        file: left
        for file, names in read.items()
        if (left := {name for name in names if not is_tested(name, tested.get(file, set()))})
    }
    assert not missing, (
        f"no test of tests/_compat exercises {missing}: add one under @relying(file)"
    )


def is_tested(name: str, tested: set[str]) -> bool:
    """Whether a name, or one below a private module, is in a promise."""
    return name in tested or any(each.startswith(f"{name}.") for each in tested)


def test_no_test_is_of_a_name_that_is_not_read(table: Any) -> None:
    for promise in table:
        text = (ROOT / relied_on.path_of(promise.file)).read_text()
        every = relied_on.parts_of(promise.name)
        private = {part for part in every if part.startswith("_")} | {every[-1]}
        assert any(re.search(rf"\b{part}\b", text) for part in private), (
            f"{promise.test}: {promise.file} reads no {promise.name} any more"
        )


def test_a_test_reads_what_instances_alone_have(table: Any) -> None:
    """Names behind a colon are not looked up before the test."""
    for promise in table:
        for name in promise.name.split(" or "):
            _, colon, behind = name.partition(":")
            last = relied_on.parts_of(behind)[-1]
            assert not colon or last in words_of(promise.function.__code__), (promise.test, name)


def words_of(code: CodeType) -> set[str]:
    """The names and strings in a function, its inner functions and classes, and the helpers it calls of its file."""
    found = {*code.co_names, *code.co_varnames}
    for constant in code.co_consts:
        found |= words_of(constant) if isinstance(constant, CodeType) else set()
        found |= (
            {*map(str, constant)} if isinstance(constant, tuple | frozenset) else {str(constant)}
        )
    return found


def test_a_private_name_is_found_in_any_form(script: Any) -> None:
    """Attributes, imports, private modules, strings, and methods that a library calls; not what a file defines."""
    import ast

    source = """
from lib._private import thing
from lib import _imported
import importlib

_own = importlib.import_module("lib._named")

class Hooks:
    _default = 1

    def _called_by_the_library(self):
        super()._stock()
        self._helper()
        self._mine = foreign._attribute

    def _helper(self):
        return getattr(foreign, "_by_string"), self._default, self._mine, _own
"""
    assert set(script.names_of(ast.parse(source))) == {
        "lib._private.thing",
        "lib._imported",
        "lib._named",
        "_called_by_the_library",
        "_stock",
        "_attribute",
        "_by_string",
    }
