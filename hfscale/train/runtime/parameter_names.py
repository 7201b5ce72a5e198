"""Find modules and parameters of a model by the names that they have in the stock model, even if PEFT has wrapped
modules for adapters.

PEFT replaces a module by a wrapper, and the module becomes the wrapper's child, which changes its name. hfscale uses
the stock model's names everywhere, so these functions search inside wrappers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.peft import WRAPPED, trained_copies, wrapped
from ..._compat.torch import own_buffers, own_modules, own_parameters
from .module_contents import ModuleContents


def stock_name(name: str) -> str:
    """Return a name in the stock model from a name with PEFT's wrappers: ``layers.0.q_proj.base_layer.weight`` ->
    ``layers.0.q_proj.weight``.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


class LiveParameters:
    """Find a model's present parameters by name. Names are computed again only after a module or parameter was added or
    removed.

    A parameter keeps its names as long as it is in the model, even if a wrapper of an unknown class is put around its
    module.
    """

    def __init__(self, model: nn.Module, contents: ModuleContents) -> None:
        self._model = model
        self._contents = contents
        self._version = 0
        self._found: dict[str, nn.Parameter] = {}
        self._around: ModuleContents | None = None
        self._changed = False
        self.outermost = model

    def look_around(self, outer: nn.Module) -> None:
        """From now on, also find the parameters of ``outer``, a module that contains the model."""
        if outer is not self._model and outer is not self.outermost:
            self.outermost, self._around, self._version = outer, ModuleContents(outer), 0

    def by_name(self) -> dict[str, nn.Parameter]:
        """Return the model's present parameters by their names in the stock model, and also by their names with PEFT's
        wrappers. A tied parameter has several names.
        """
        contents = self._around or self._contents
        if self._version != (version := contents.version()):
            self._found = self._look()
            self._version = version
            self._changed = True
        return dict(self._found)

    def changed(self) -> bool:
        """Return whether the result of :meth:`by_name` has changed since the previous call of this method."""
        changed = self._changed
        self._changed = False
        return changed

    def _look(self) -> dict[str, nn.Parameter]:
        full = dict(self._model.named_parameters(remove_duplicate=False))
        parameters = {stock_name(name): parameter for name, parameter in full.items()} | full
        here = set(map(id, full.values()))
        earlier = {
            name: parameter for name, parameter in self._found.items() if id(parameter) in here
        }
        parameters = earlier | parameters
        for name, parameter in self.outermost.named_parameters():
            if id(parameter) not in here:
                parameters[name] = parameter
        return parameters

    def forget(self) -> None:
        """Drop all references to the model's parameters."""
        self._found = {}
        self._version = 0


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the stock module inside any number of PEFT's wrappers; a module that is not wrapped is returned itself."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def computing(module: nn.Module) -> list[nn.Module]:
    """Return the stock modules in PEFT's wrapper, of which one computes the output: the wrapped module, and its trained
    copies, one per adapter.
    """
    return [unwrapped(module), *trained_copies(module)]


def module_at(model: nn.Module, name: str) -> nn.Module:
    """Return the module at ``name``, which may be a name in the stock model, or a name with PEFT's wrappers. A module
    that PEFT has wrapped is returned with its wrappers. Raise AttributeError if there is no such module.
    """
    module = model
    for part in name.split(".") if name else ():
        while part not in own_modules(module) and (inner := wrapped(module)) is not None:
            module = inner
        module = module.get_submodule(part)
    return module


def owner_of(model: nn.Module, parameter: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter, and the parameter's attribute name in it. ``parameter`` is a name in
    the stock model, or a name with PEFT's wrappers.
    """
    owner, _, attribute = parameter.rpartition(".")
    module = module_at(model, owner)
    while attribute not in own_parameters(module) and (inner := wrapped(module)) is not None:
        module = inner
    return module, attribute


def parameter_at(model: nn.Module, name: str) -> Any:
    """Return the parameter at ``name``, a name in the stock model or with PEFT's wrappers."""
    module, attribute = owner_of(model, name)
    return own_parameters(module)[attribute]


def put_parameter(model: nn.Module, name: str, parameter: Tensor) -> None:
    """Replace the parameter at ``name`` (in the stock model, or with PEFT's wrappers) by ``parameter``, which may be a
    plain tensor. The order of the module's parameters does not change.
    """
    module, attribute = owner_of(model, name)
    own_parameters(module)[attribute] = parameter


def put_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Replace the buffer at ``name`` (in the stock model, or with PEFT's wrappers) by ``buffer``."""
    owner, _, attribute = name.rpartition(".")
    own_buffers(module_at(model, owner))[attribute] = buffer


def materialize_buffers(model: nn.Module, buffers: dict[str, Tensor], device: torch.device) -> None:
    """Replace the model's buffers named in ``buffers`` (which are on the meta device) by the given tensors, and move
    all buffers to ``device``.
    """
    for name, buffer in list(model.named_buffers()):
        put_buffer(model, name, buffers.get(name, buffer).to(device))
