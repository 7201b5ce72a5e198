"""The package from outside: its public names, and what importing it costs."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import hfscale
from hfscale.config.schedules import schedule_names

HEAVY = ("torch", "transformers", "accelerate", "peft", "datasets", "omegaconf", "matplotlib")


def test_every_public_name_is_there_and_declared_to_type_checkers() -> None:
    assert set(hfscale.__all__) <= set(dir(hfscale))
    for name in hfscale.__all__:
        assert getattr(hfscale, name) is not None
    tree = ast.parse(Path(hfscale.__file__).with_suffix(".pyi").read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    declared = {alias.asname: node.module for node in nodes for alias in node.names}
    assert set(hfscale.__all__) - {"__version__"} == set(declared)
    for name, module in declared.items():
        assert getattr(importlib.import_module(f"hfscale.{module}"), name) is getattr(hfscale, name)
    with pytest.raises(AttributeError, match="has no attribute 'from_pretraind'"):
        hfscale.from_pretraind  # noqa: B018


def test_private_names_of_others_are_asked_for_in_compat_alone() -> None:
    """What ruff's SLF001 does not see: ``getattr(model, "_name")``."""
    root = Path(hfscale.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        if root / "_compat" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and len(node.args) > 1
            ):
                name = getattr(node.args[1], "value", None)
                asked = node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(
                    name, str
                )
                if (
                    asked
                    and name.startswith("_")
                    and not name.startswith("__")
                    and ast.unparse(node.args[0]) != "self"
                ):
                    found.append(f"{path.relative_to(root)}:{node.lineno} {name}")
    assert not found


def test_functions_named_like_a_submodule_stay_functions() -> None:
    importlib.import_module("hfscale.plan")
    assert isinstance(hfscale.plan, FunctionType)


def test_plans_are_data() -> None:
    """``hfscale.plan`` knows neither modules nor transformers: tensors are all it takes from outside."""
    for file in (Path(hfscale.__file__).parent / "plan").glob("*.py"):
        tree = ast.parse(file.read_text())
        found = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        outside = {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names}
        assert outside <= {"torch", "torch.Tensor"}, file


@pytest.mark.parametrize(
    "lines",
    [
        [
            ["--help"],
            ["--version"],
            ["completion", "bash"],
            ["plan", "--help"],
            ["doctor", "--help"],
            ["verify"],
        ],
        [
            ["plan", "./nothing"],
            ["verify", "/no/where"],
            ["upcycle", "./nothing", "out"],
            ["plan", "m", "--gpu"],
            *(
                ["plan", "m", flag, "x"]
                for flag in ("--tp", "--schedule", "--cp-method", "--tokens", "--tensor")
            ),
            *(
                ["estimate", "m", flag, "0"]
                for flag in ("--hardware", "--batch-size", "--sequence-length", "--pp")
            ),
        ],
        [
            ["schedule", "--pp"],
            ["schedule", "--pp", "4"],
            ["schedule", "--pp", "2", "--schedule", "pipedream"],
        ]
        + [
            ["schedule", "--pp", "2", "--microbatches", "4", "--schedule", name]
            for name in schedule_names()
        ],
    ],
)
def test_a_command_line_is_read_without_importing_torch(lines: list[list[str]]) -> None:
    code = (
        f"import sys; from hfscale.cli import main; [main(line) for line in {lines!r}]; "
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


# Kernels of CUDA; names that transformers writes, torch has, or users give.
_NAME_CUDA = {
    "features/fp8/scaled_matmul.py",
    "distributed/ops/grouped_linear.py",
    "parallel/context/kernels.py",
    "distributed/ops/head_cross_entropy.py",
    "config/options.py",
    "integrations/trainer/resume_callbacks.py",
    "parallel/tensor/lazy_logits.py",
    "cost/tools/simulated_rank.py",
}


def test_one_module_says_what_is_an_accelerator() -> None:
    """``_compat/torch_device.py``: others ask it, so that any accelerator is treated as a GPU is."""
    package = Path(hfscale.__file__).parent
    naming = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"torch\.cuda\b|\bis_cuda\b|\"cuda\"", path.read_text())
        and path.parent.name != "_compat"
    }
    assert naming <= _NAME_CUDA
