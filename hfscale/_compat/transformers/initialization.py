"""Transformers' initialization of modules, and its mark on loaded tensors.

Read and run with transformers 5.17.0 and 5.23.0.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as host_init

from ..replaced import attribute_replaced
from ..torch import own_buffers
from .classes import empty_copy

_LOADED = "_is_hf_initialized"


def initialize_weights(model: Any, unit: nn.Module, recurse: bool) -> None:
    """Initialize ``unit``, a part of ``model`` in real memory, as transformers does within the full model."""
    owner = model
    for module in model.modules():  # the innermost model that contains the unit
        if isinstance(module, PreTrainedModel) and any(part is unit for part in module.modules()):
            owner = module
    with torch.no_grad():
        if not recurse:
            owner._initialize_weights(unit)
            return
        for _, module, its_owner in _children_first(unit, "", owner):
            its_owner._initialize_weights(module)


def initializations(model: Any) -> Iterator[tuple[str, nn.Module, Callable[[], None]]]:
    """Yield every module of ``model`` with its name and its initializer, in transformers' order; as after loading,
    initializers leave tensors alone that are marked as loaded.
    """
    custom = model.is_custom_code()

    def initialize(module: nn.Module, owner: Any) -> None:
        with torch.no_grad(), host_init.guard_torch_init_functions():
            owner._initialize_weights(module, custom)

    for name, module, owner in _children_first(model, "", model):
        yield name, module, partial(initialize, module, owner)


def _children_first(module: nn.Module, name: str, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield ``(name, module, innermost model around it)``, children before parents."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}" if name else key, owner)
    yield name, module, owner


def construct(model: Any, kinds: Collection[type[nn.Module]]) -> Any:
    """Build a copy of ``model`` on the meta device, with the own tensors of modules of these ``kinds`` in real memory.
    These get the values that constructors and then transformers' initialization give them, including that of modules
    around them; NaN where nothing does.
    """
    with ExitStack() as stack:
        stack.enter_context(attribute_replaced(PreTrainedModel, "init_weights", lambda _: None))
        for kind in kinds:
            stack.enter_context(attribute_replaced(kind, "__init__", _over_memory(kind.__init__, kinds)))
        made = empty_copy(model)
    for module in made.modules():
        for name, buffer in own_buffers(module).items() if type(module) in kinds else ():
            if buffer is not None and buffer.is_meta:  # set by a module around this one
                own_buffers(module)[name] = torch.full_like(buffer, torch.nan, device="cpu")
    initialize_weights(made, made, recurse=True)
    return made


def _over_memory(constructor: Callable[..., None], kinds: Collection[type[nn.Module]]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def construct_really(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            constructor(module, *args, **kwargs)
        for inner in module.modules():
            if type(inner) not in kinds:
                inner.to_empty(device="meta", recurse=False)

    return construct_really


def is_loaded(tensor: Tensor) -> bool:
    """Return whether transformers has marked a parameter or buffer as loaded."""
    return bool(getattr(tensor, _LOADED, False))


def mark_loaded(tensor: Tensor) -> None:
    """Mark a parameter or buffer as transformers marks loaded ones."""
    setattr(tensor, _LOADED, True)
