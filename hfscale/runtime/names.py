"""Names of the stock model, also where adapters are wrapped around its modules.

PEFT puts a wrapper in the place of a module, which becomes the wrapper's child. Everything in hfscale goes by the names
that the stock model has: they are found through wrappers here.
"""

from typing import Any

from torch import Tensor, nn

from .._host.peft import WRAPPED, trained_copies, wrapped
from .._host.torch import own_buffers, own_modules, own_parameters


def stock_name(name: str) -> str:
    """``layers.0.q_proj.base_layer.weight`` -> ``layers.0.q_proj.weight``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def unwrapped(module: nn.Module) -> nn.Module:
    """The stock module under any number of wrappers."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def computing(module: nn.Module) -> list[nn.Module]:
    """The stock modules in a wrapper, any of which may compute: what it wraps, and trained copies of that."""
    return [unwrapped(module), *trained_copies(module)]


def module_at(model: nn.Module, name: str) -> nn.Module:
    """The module of a stock name, or what is wrapped around it; stock names and the wrappers' own are both found.

    Raises:
        AttributeError: there is no such module.
    """
    module = model
    for part in name.split(".") if name else ():
        while part not in own_modules(module) and (inner := wrapped(module)) is not None:
            module = inner
        module = module.get_submodule(part)
    return module


def owner_of(model: nn.Module, parameter: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and its attribute there; names as for :func:`module_at`."""
    owner, _, attribute = parameter.rpartition(".")
    module = module_at(model, owner)
    while attribute not in own_parameters(module) and (inner := wrapped(module)) is not None:
        module = inner
    return module, attribute


def parameter_at(model: nn.Module, name: str) -> Any:
    """The parameter of that name, or what holds its place; names as for :func:`module_at`."""
    module, attribute = owner_of(model, name)
    return own_parameters(module)[attribute]


def put_parameter(model: nn.Module, name: str, parameter: Tensor) -> None:
    """Let ``parameter`` take the place of the one of that name; names as for :func:`module_at`.

    It may be a plain tensor for a while, and keeps its predecessor's place in the order.
    """
    module, attribute = owner_of(model, name)
    own_parameters(module)[attribute] = parameter


def put_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Let ``buffer`` take the place of the one of that name; names as for :func:`module_at`."""
    owner, _, attribute = name.rpartition(".")
    own_buffers(module_at(model, owner))[attribute] = buffer
