"""The shape of the package: its imports, and how long its files and functions are. Read from the source alone.

The import contracts in pyproject.toml say which room may import which; here no two modules import each other, also
across a few steps, counting what is imported for type checkers and within functions.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hfscale.api.assemble import PLAN_PARTS

ROOT = Path(__file__).parents[1] / "hfscale"
LONGEST_FILE = 3300
LONGEST_FUNCTION = 580
MOST_BRANCHES = 15
"""Of a file and of a function, in tokens: how many lines they take is the formatter's."""
TOO_LONG: set[str] = set()
"""Functions over the limits, to be taken apart; one that has been leaves this list."""
TOKENS_A_LINE = 8.5
DENSE_LINE = 30
DENSE_SHARE = 0.005
MOST_ASSIGNED_AT_ONCE = 35
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def _nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(FILES[module].read_text())))


def _imported(module: str) -> Iterator[str]:
    """Every module named in an import of ``module``, wherever in the file it stands."""
    package = module.split(".") if FILES[module].name == "__init__.py" else module.split(".")[:-1]
    for node in _nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in FILES else source


@cache
def _graph() -> dict[str, set[str]]:
    return {
        module: {name for name in _imported(module) if name in FILES and name != module}
        for module in FILES
    }


def _circles() -> list[set[str]]:
    """Groups of modules each of which reaches all others (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        open_.append(module)
        for other in _graph()[module]:
            if other not in order:
                visit(other)
            if other in open_:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            place = open_.index(module)
            if len(open_) - place > 1:
                found.append(set(open_[place:]))
            del open_[place:]

    for module in FILES:
        if module not in order:
            visit(module)
    return found


def test_no_modules_import_each_other() -> None:
    assert sum(map(len, _graph().values())) > 2 * len(FILES), "the imports were not read"
    assert _circles() == []


def test_packages_import_nothing_of_their_own() -> None:
    """Who needs one module of a room would import all of them; so these alone do, whose modules need each other."""
    reexport = {
        module
        for module, path in FILES.items()
        if path.name == "__init__.py"
        and any(name.startswith(f"{module}.") for name in _graph()[module])
    }
    assert reexport <= {
        "hfscale.cli",
        "hfscale.features.adapters",
        "hfscale.integrations.accelerator",
        "hfscale.integrations.trainer",
        "hfscale.models",
        "hfscale.optim",
        "hfscale.plan",
        "hfscale.testing",
        "hfscale.train.runtime",
        "hfscale",
    }


@cache
def _tokens_by_line(module: str) -> Counter[int]:
    """Count the tokens on each line of code; docstrings and comments are none."""
    prose: set[int] = set()
    for node in _nodes(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = _tokens(FILES[module].read_text())
    return Counter(token.start[0] for token in tokens if token.start[0] not in prose)


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of code. An f-string is one token, as it was before Python 3.12 took it apart."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if depth == 0 and token.type not in _NO_CODE:
            yield token
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")


def test_files_are_short() -> None:
    lengths = {module: sum(_tokens_by_line(module).values()) for module in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_lines_read_once() -> None:
    counts = [count for module in FILES for count in _tokens_by_line(module).values()]
    assert sum(counts) / len(counts) <= TOKENS_A_LINE
    assert sum(count >= DENSE_LINE for count in counts) / len(counts) <= DENSE_SHARE


def test_no_literal_is_starred_and_few_tuples_assigned() -> None:
    literal = (ast.Tuple, ast.List)
    starred = []
    at_once = []
    for module in FILES:
        for node in _nodes(module):
            if isinstance(node, ast.Starred) and isinstance(node.value, literal):
                starred.append(f"{module}:{node.lineno}")
            if isinstance(node, ast.Assign) and isinstance(node.value, literal):
                targets = node.targets[0]
                if isinstance(targets, ast.Tuple) and len(node.value.elts) > 2:
                    at_once.append(f"{module}:{node.lineno}")
    assert starred == []
    assert len(at_once) <= MOST_ASSIGNED_AT_ONCE, at_once


def _branches(function: ast.AST) -> int:
    kinds = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension)
    nodes = list(ast.walk(function))
    return sum(isinstance(n, kinds) for n in nodes) + sum(
        len(n.values) - 1 for n in nodes if isinstance(n, ast.BoolOp)
    )


def test_functions_are_short_and_branch_little() -> None:
    over = {}
    for module in FILES:
        tokens = _tokens_by_line(module)
        for node in _nodes(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                span = range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
                length = sum(tokens[line] for line in span)
                branches = _branches(node)
                if length > LONGEST_FUNCTION or branches > MOST_BRANCHES:
                    name = f"{FILES[module].relative_to(ROOT.parent)}:{node.name}"
                    over[name] = (length, branches)
    assert {name: size for name, size in over.items() if name not in TOO_LONG} == {}
    assert over.keys() >= TOO_LONG, "leaves the list: it is short by now"


@pytest.mark.parametrize("library", ["torch.nn", "transformers"])
def test_plans_are_data(library: str) -> None:
    users = {
        module
        for module in FILES
        if module.startswith("hfscale.plan") and not module.startswith("hfscale.plan.drafting")
        for name in [*_imported(module), *_named_of_torch(module)]
        if name == library or name.startswith(f"{library}.")
    }
    assert users == set()


def _named_of_torch(module: str) -> Iterator[str]:
    """``from torch import nn``."""
    for node in _nodes(module):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from (f"torch.{alias.name}" for alias in node.names)


def test_a_feature_is_planned_in_its_own_folder() -> None:
    places = {function.__name__: function.__module__ for function in PLAN_PARTS}
    assert {name: place for name, place in places.items() if not place.endswith(".plan")} == {}
    assert {place.split(".")[1] for place in places.values()} == {"features", "parallel"}


def _naming(names: str, room: str) -> set[str]:
    """Return the files outside a feature's room that name the feature."""
    named = re.compile(names)
    files = {module for module, path in FILES.items() if named.search(path.read_text())}
    return {module for module in files if not module.startswith(room)}


def test_context_parallelism_is_named_in_few_files() -> None:
    """Its options, the mesh, its plan, its cost, and lists of all axes."""
    assert _naming(r"\bcp\b|\bcp_", "hfscale.parallel.context") == {
        "hfscale.checkpoint.random_states",
        "hfscale.checkpoint.state_format",
        "hfscale.config.layout",
        "hfscale.config.options",
        "hfscale.config.parallel",
        "hfscale.cost.model.step_time",
        "hfscale.cost.model.traffic",
        "hfscale.cost.tools.fast_cost",
        "hfscale.distributed.mesh",
        "hfscale.distributed.process_groups",
        "hfscale.errors",
        "hfscale.plan.context_plan",
    }


def test_a_feature_is_named_in_few_files() -> None:
    """The table of parts, that of added layers, the options and their recipes, and what transformers has of it."""
    names = r"mtp_|\bmtp\b|multi.token|prediction\.(part|plan)|\bPREDICTION\b"
    assert _naming(names, "hfscale.features.prediction") == {
        "hfscale._compat.transformers.prediction",
        "hfscale.api.assemble",
        "hfscale.api.build",
        "hfscale.config.options",
        "hfscale.features.added_layers",
        "hfscale.recipes.schema",
    }
