"""Write docs/api.md, every public name of hfscale with its arguments and the first lines of its docstring; and
docs/reference.md, which the site fills with all of it: types, defaults, errors, sources.

python scripts/api_table.py [--check]

Reads source files and imports nothing, so it runs anywhere. A public name that no group has is an error.
"""

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "api.md"
REFERENCE = ROOT / "docs" / "reference.md"
GROUPS = {
    "Layout and plan": [
        "ParallelConfig",
        "MemoryConfig",
        "Float8Config",
        "plan",
        "memory_estimate",
        "estimate",
    ],
    "Make a model": ["from_pretrained", "from_config", "parallelize"],
    "Train": [
        "train_step",
        "eval_step",
        "Teacher",
        "token_scores",
        "TokenScores",
        "clip_grad_norm_",
        "drain",
        "metrics",
        "create_optimizer",
        "balanced_batches",
        "batch_rank",
        "batch_world",
    ],
    "Save and resume": [
        "save_pretrained",
        "save_state",
        "load_state",
        "load_optimizer",
        "wait_for_saves",
        "check_save",
        "SaveCheck",
        "StatesInMemory",
        "restart_in_place",
        "stream_weights",
        "preempted",
        "watchdog",
        "fitting_layout",
        "Preempted",
        "BadSteps",
    ],
    "Adapters": ["get_peft_model", "merge_and_unload", "coverage_report"],
    "Mixtures of experts": [
        "RoutingConfig",
        "expert_load",
        "ExpertLoad",
        "ExpertLoadHistory",
        "verify_experts",
        "upcycle",
        "record_routes",
        "routes_from_vllm",
        "routes_from_sglang",
    ],
    "Pipelines": ["record_schedule"],
    "Accelerate and Trainer": [
        "Accelerator",
        "Trainer",
        "Seq2SeqTrainer",
        "TrainerMixin",
        "StatesInMemoryCallback",
    ],
    "Errors": [
        "HFScaleError",
        "ConfigError",
        "PlanError",
        "MeshError",
        "CheckpointError",
        "BadStepError",
    ],
}
FIELDS = ["ParallelConfig", "MemoryConfig", "Float8Config", "RoutingConfig"]
# Where the fields are, if not in the class.
DECLARED = {"ParallelConfig": ("LayoutFields", "hfscale.config.layout")}
HEAD = """# Public names

This page lists the public names of hfscale; `scripts/api_table.py` writes it from their docstrings. The docstrings also
describe arguments, results and errors; on the documentation site they are in [reference.md](reference.md). Names that
this page does not list may change without notice. `hfscale.testing` is for tests: see [testing.md](testing.md).
"""
REFERENCE_HEAD = """# Every argument

On the site, this page has the docstrings of all public names: arguments with types and defaults, results, errors, and
the papers of the methods. `make site` inserts them; in a clone read [api.md](api.md), or
`help(hfscale.from_pretrained)`. The list of names is written by `scripts/api_table.py`.
"""


def exported() -> dict[str, str]:
    """Public name -> the module, relative to the package, that ``hfscale/__init__.pyi`` takes it from."""
    tree = ast.parse((ROOT / "hfscale" / "__init__.pyi").read_text())
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module != "version":
            found |= {alias.name: f"hfscale.{node.module}" for alias in node.names}
    return found


def definition(name: str, module: str) -> ast.FunctionDef | ast.ClassDef:
    """Return the definition, followed through re-exports."""
    return _found(name, module)[0]


def place(name: str, module: str) -> str:
    """Return the dotted name of the definition, followed through re-exports."""
    return f"{_found(name, module)[1]}.{name}"


def _found(name: str, module: str) -> tuple[ast.FunctionDef | ast.ClassDef, str]:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.parse(path.read_text()).body:
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef)
            and node.name == name
            and not _overload(node)
        ):
            return node, module
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            base = package[: len(package) - node.level + 1] if node.level else []
            return _found(name, ".".join([*base, *([node.module] if node.module else [])]))
    raise SystemExit(f"{module} does not define {name}")


def _overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether it says a type only: what it does is said behind it."""
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list)


def arguments(node: ast.FunctionDef | ast.ClassDef) -> str:
    """``(model, directory, *, timeout=)`` without types; nothing for a class."""
    if isinstance(node, ast.ClassDef):
        return ""
    given = node.args
    listed = [*given.posonlyargs, *given.args]
    optional = len(listed) - len(given.defaults)
    words = [arg.arg + ("=" if index >= optional else "") for index, arg in enumerate(listed)]
    words += ["*"] if given.kwonlyargs and not given.vararg else []
    words += [f"*{given.vararg.arg}"] if given.vararg else []
    words += [
        arg.arg + ("=" if default is not None else "")
        for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    words += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return f"({', '.join(words)})"


def summary(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The first paragraph of its docstring, on one line, in Markdown's quotes."""
    text = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return plain(text).removesuffix("::")


def plain(text: str) -> str:
    """What a docstring says, as a cell of a Markdown table."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(text.split()).replace("``", "`"))
    return text.replace("`hfscale.", "`").replace("|", "\\|")


def described(node: ast.FunctionDef | ast.ClassDef) -> dict[str, str]:
    """Name -> text of the entries under ``Args:`` or ``Attributes:``."""
    text = ast.get_docstring(node) or ""
    section = re.search(r"(?ms)^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", text)
    entries = re.split(r"(?m)^    (?=\w+: )", section[1])[1:] if section else []
    return {name: plain(words) for name, _, words in (entry.partition(": ") for entry in entries)}


def page() -> str:
    """The whole page."""
    modules = exported()
    listed = [name for names in GROUPS.values() for name in names]
    if sorted(listed) != sorted(modules):
        raise SystemExit(
            f"the groups of this script and hfscale's names differ: {set(listed) ^ set(modules)}"
        )
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n\n| | |\n|---|---|")
        for name in names:
            node = definition(name, modules[name])
            parts.append(f"| `{name}{arguments(node)}` | {summary(node)} |")
        parts.append("")
    for name in FIELDS:
        fields = described(definition(*DECLARED.get(name, (name, modules[name]))))
        rows = [f"| `{field}` | {words} |" for field, words in fields.items()]
        parts += [f"## Fields of {name}\n\n| | |\n|---|---|", *rows, ""]
    return "\n".join(parts)


def reference() -> str:
    """The page of directives that mkdocstrings reads."""
    modules = exported()
    parts = [REFERENCE_HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [f"::: {place(name, modules[name])}\n" for name in names]
    for name, declared in DECLARED.items():
        parts += [f"## Fields of {name}\n", f"::: {declared[1]}.{declared[0]}\n"]
    return "\n".join(parts)


def main() -> int:
    """Write both, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where it is not current"
    )
    if parser.parse_args().check:
        return int(page() != OUT.read_text() or reference() != REFERENCE.read_text())
    OUT.write_text(page())
    REFERENCE.write_text(reference())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
