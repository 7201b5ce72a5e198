"""Undocumented names of Liger Kernel (Hsu et al. 2024): how it patches the modules of a model.

Read and run with Liger 0.8.5. Imported on first use only: it imports Triton.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from importlib.util import find_spec
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

LOSSES = ("cross_entropy", "fused_linear_cross_entropy")  # Liger's switches for the loss


def is_installed() -> bool:
    """Return whether Liger can be imported."""
    return find_spec("liger_kernel") is not None


def switches_of(model_type: str) -> list[str] | None:
    """Return the names of the options by which Liger's function for a model family chooses kernels (``rope``,
    ``rms_norm``, ...), including those for the loss. Return ``None`` if Liger does not support the family.
    """
    function = _function_of(model_type)
    return (
        None
        if function is None
        else [name for name in inspect.signature(function).parameters if name != "model"]
    )


def _function_of(model_type: str) -> Any:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)


def computes_in(dtype: torch.dtype) -> bool:
    """Return whether Liger's kernels have backward passes in this dtype."""
    from liger_kernel.ops.utils import torch_to_triton_dtype

    return dtype in torch_to_triton_dtype


def give_kernels(model: Any, switches: Mapping[str, bool]) -> None:
    """Replace forward methods of modules of ``model`` by Liger's kernels, which Liger's own function chooses; the loss
    stays unchanged.

    Liger's function also replaces classes and the rotary embedding in the files of transformers, for all models of the
    family. These replacements are undone, so that other models stay unchanged. Modules of ``model`` that call the
    rotary embedding get their own forward method, which calls Liger's.
    """
    family = model.config.model_type
    wanted = {**switches, **dict.fromkeys(LOSSES, False)}
    known = {name: wanted[name] for name in switches_of(family) or () if name in wanted}
    with _names_of_files() as replaced:
        _function_of(family)(model=model, **known)
    for module in model.modules():
        stock = type(module).forward
        if "forward" in vars(module) or not isinstance(stock, FunctionType):
            continue
        computing = inspect.unwrap(stock)
        changed = replaced.get(id(computing.__globals__), {})
        functions = {
            name: value for name, value in changed.items() if isinstance(value, FunctionType)
        }
        used = functions.keys() & set(computing.__code__.co_names)
        if used:
            names = {name: functions[name] for name in used}
            module.forward = MethodType(_with_names(stock, names), module)


def _with_names(stock: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function and of its decorators in which the function's global variables ``names`` have the
    given values.
    """
    inner = vars(stock).get("__wrapped__")
    cells = stock.__closure__
    if inner is not None:  # the closure of a decorator contains the function to call
        changed = CellType(_with_names(inner, names))
        cells = tuple(changed if cell.cell_contents is inner else cell for cell in cells or ())
    known = stock.__globals__ if inner is not None else {**stock.__globals__, **names}
    made = FunctionType(stock.__code__, known, stock.__name__, stock.__defaults__, cells)
    made.__kwdefaults__ = stock.__kwdefaults__
    update_wrapper(made, stock)
    return made


def activation_of(module: nn.Module) -> str | None:
    """Return the activation that the module's Liger kernel applies to its gate; ``None`` if it has no gate."""
    name = repr(module).partition("(")[0]  # the kernel's name, if Liger has changed the module
    if name == type(module).__name__:
        return None
    if "SwiGLU" in name or "Top2MLP" in name:
        return "silu"
    return "gelu_pytorch_tanh" if "GEGLU" in name else None


def keep_gradients(module: nn.Module) -> None:
    """Stop a Liger norm from overwriting the gradient of its output with the gradient of its input."""
    if vars(module).get("in_place"):
        module.in_place = False  # type: ignore[assignment]


@contextmanager
def _names_of_files() -> Iterator[dict[int, dict[str, Any]]]:
    """Restore, at the end of the block, all names in files of transformers and torch that were replaced in the block.

    Yield a dict that is filled at the end of the block: ``id`` of a file's ``globals()`` -> name -> the value that had
    replaced the original one.
    """
    files: list[ModuleType] = [nn, nn.functional]
    files += [file for name, file in list(sys.modules.items()) if ".modeling_" in name]
    tables = [vars(file) for file in files if isinstance(file, ModuleType)] + [ACT2FN]
    before = [(names, dict(names.items())) for names in tables]
    replaced: dict[int, dict[str, Any]] = {}
    try:
        yield replaced
    finally:
        for names, stock in before:
            changed = {
                name: value
                for name, value in names.items()
                if name in stock and value is not stock[name]
            }
            replaced[id(names)] = changed
            names.update({name: stock[name] for name in changed})


def applies(function: Any, name: str) -> bool:
    """Return whether ``function`` computes the activation ``name``: ``"silu"``, or else GELU in its tanh approximation.
    Tried on a few values.
    """
    x = torch.linspace(-4, 4, 9)
    wanted: Tensor = (
        nn.functional.silu(x) if name == "silu" else nn.functional.gelu(x, approximate="tanh")
    )
    return bool(torch.allclose(function(x), wanted, atol=1e-6))
