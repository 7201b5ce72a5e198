"""Names of the stock model, also where adapters are wrapped around its modules.

PEFT puts a wrapper in the place of a module, which becomes the wrapper's child. Everything in hfscale goes by the names
that the stock model has: they are found through wrappers here.
"""

from torch import Tensor, nn

# Under what names PEFT's wrappers hold what they wrap.
_WRAPPED = ("base_layer", "original_module")
_COPIES = "modules_to_save"


def stock_name(name: str) -> str:
    """``layers.0.q_proj.base_layer.weight`` -> ``layers.0.q_proj.weight``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def unwrapped(module: nn.Module) -> nn.Module:
    """The stock module under any number of wrappers."""
    while (inner := _wrapped(module)) is not None:
        module = inner
    return module


def computing(module: nn.Module) -> list[nn.Module]:
    """The stock modules in a wrapper, any of which may compute: what it wraps, and trained copies of that."""
    copies = module._modules.get(_COPIES)
    return [unwrapped(module), *(copies.children() if copies is not None else ())]


def module_at(model: nn.Module, name: str) -> nn.Module:
    """The module of a stock name, or what is wrapped around it; stock names and the wrappers' own are both found.

    Raises:
        AttributeError: there is no such module.
    """
    module = model
    for part in name.split(".") if name else ():
        while part not in module._modules and (inner := _wrapped(module)) is not None:
            module = inner
        module = module.get_submodule(part)
    return module


def owner_of(model: nn.Module, parameter: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and its attribute there; names as for :func:`module_at`."""
    owner, _, attribute = parameter.rpartition(".")
    module = module_at(model, owner)
    while attribute not in module._parameters and (inner := _wrapped(module)) is not None:
        module = inner
    return module, attribute


def put_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set the parameter of that name; names as for :func:`module_at`."""
    module, attribute = owner_of(model, name)
    module._parameters[attribute] = parameter


def put_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Set the buffer of that name, persistent or not as it was."""
    owner, _, attribute = name.rpartition(".")
    module_at(model, owner)._buffers[attribute] = buffer


def _wrapped(module: nn.Module) -> nn.Module | None:
    return next((module._modules[name] for name in _WRAPPED if module._modules.get(name) is not None), None)
