"""Names of torch that it does not promise to keep: modules' contents, autograd's bookkeeping, dispatch, groups.

Read and run with torch 2.11 to 2.13. FSDP2 and the pipelines' engine have files of their own beside this one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state as composable
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

__all__ = ["TorchDispatchMode", "functional_collectives", "tree_leaves", "tree_map"]

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_non_full_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Attributes of a module: its hooks, by kind."""

CONTENTS = ("_parameters", "_buffers", "_modules", "training")
"""Attributes of a module: what it holds."""


def before_iterators(loader: DataLoader[Any], function: Callable[[], None]) -> None:
    """Call ``function`` each time that the loader is about to draw the seed of its workers."""
    stock = loader._get_iterator

    def get_iterator() -> Any:
        function()
        return stock()

    loader._get_iterator = get_iterator  # type: ignore[method-assign]


@contextmanager
def autocast_remembers() -> Iterator[None]:
    """Within: autocast keeps its copies of weights that train from one use of it to the next; who is within already
    goes on to keep them.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def is_compiled(model: nn.Module) -> bool:
    """Whether it is what ``torch.compile(model)`` returned."""
    return hasattr(model, "_orig_mod")


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """What ``module`` itself holds as parameters, by attribute; changes to it are changes to the module.

    Other than ``register_parameter`` and ``setattr`` it takes any tensor, and what takes the place of a parameter keeps
    its place in the order. Other than ``named_parameters`` it tells a parameter's second name too.
    """
    held: dict[str, Any] = module._parameters
    return held


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """What ``module`` itself holds as buffers, by attribute; changes to it are changes to the module."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of ``module``, by attribute, second names too; changes to it are changes to the module."""
    return module._modules


def passes_otherwise(module: nn.Module) -> bool:
    """Whether this very module does something else in a forward pass than others of its class: by hooks, or by a
    ``forward`` of its own.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def counts_forward_hooks(module: nn.Module) -> int:
    """How many hooks look at what ``module`` returns."""
    return len(module._forward_hooks)


def forward_hooks(module: nn.Module) -> list[Any]:
    """What looks at what ``module`` is given and returns, and at their gradients."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for held in kinds for hook in held.values()] if any(kinds) else []


def forget_composed(module: nn.Module) -> None:
    """Let FSDP2, which marks a module by its class as well, forget that it was put around ``module``."""
    composable._module_state_mapping.pop(module, None)


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether something runs when the gradient of ``tensor`` is computed or accumulated."""
    return has_backward_hook(tensor) or has_accumulation_hook(tensor)


def has_backward_hook(tensor: Tensor) -> bool:
    """Whether something runs when the gradient of ``tensor`` is computed."""
    return bool(tensor._backward_hooks)


def has_accumulation_hook(tensor: Tensor) -> bool:
    """Whether something runs when the gradient of ``tensor`` has been accumulated."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes ``tensor`` for a view of another."""
    return tensor._is_view()


def version_of(tensor: Tensor) -> int:
    """How often ``tensor`` has been written to in place."""
    return tensor._version


def storage_key(held: Tensor | torch.UntypedStorage) -> int:
    """The identity of a tensor's storage among those that are alive; on the meta device too, where addresses are 0."""
    return int((held.untyped_storage() if isinstance(held, Tensor) else held)._cdata)


def base_of(tensor: Tensor) -> Tensor | None:
    """What a tensor is a view of; ``None``: of nothing."""
    return tensor._base


def backward_pass() -> int:
    """The number of the backward pass under way on this thread, or -1."""
    return torch._C._current_graph_task_id()


def backward_keeps_graph() -> bool:
    """Whether the backward pass under way keeps what the graph has saved (``retain_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # type: ignore[attr-defined]


def function_modes() -> list[Any]:
    """The modes that see calls of torch's functions now, the outermost first."""
    return list(_get_current_function_mode_stack())


def operators_named(name: str) -> list[Any] | None:
    """Torch's operator ``aten.mm.default``, or all overloads of ``aten.mm``, without those that write to what they are
    given; ``None`` where there is no such operator.
    """
    found: Any = torch.ops
    for part in name.removeprefix("torch.ops.").replace("::", ".").split("."):
        found = getattr(found, part, None)
    several = isinstance(found, torch._ops.OpOverloadPacket)
    if not several and not isinstance(found, torch._ops.OpOverload):
        return None
    every = [getattr(found, each) for each in found.overloads()] if several else [found]
    return [each for each in every if not each._schema.is_mutable]


def next_node_number() -> int:
    """The number that autograd will give to the next node of this thread."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def current_node_number() -> int:
    """The number of the node that the backward pass under way is at."""
    return int(torch._C._current_autograd_node()._sequence_nr())


def tensor_without_memory(kind: type, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """An instance of a subclass of ``Tensor`` that has a shape and a type, and no values."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


def as_plain_tensors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` as if subclasses of ``Tensor`` had no ``__torch_function__``."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def schema_of(operation: Any) -> Any:
    """What an operation that a dispatch mode sees takes, writes to and returns."""
    return operation._schema


def norms_of(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each of ``tensors``, which are alike, by one launch."""
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype))


def unscale_and_check(gradients: list[Tensor], factor: float) -> bool:
    """Multiply ``gradients`` in place; whether any of them has an entry that is not finite. Waits for the device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found = {device: torch.zeros(1, device=device) for device, _ in groups}
    for (device, _), same in groups.items():
        torch._amp_foreach_non_finite_check_and_unscale_(same, found[device], torch.tensor(factor, device=device))
    return any(bool(each) for each in found.values())


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply ``tensors``, which are alike, in place by one launch, in 32 bits at least."""
    first = tensors[0]
    if first.element_size() > 2:
        torch._foreach_mul_(tensors, factor.to(first))
    else:  # `_foreach_mul_` would round the factor to the type of the tensors; gradients are unscaled by a wide one
        found = torch.zeros(1, device=first.device)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor.to(first.device, torch.float32))


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What carries tensors on ``device`` within ``group``.

    Raises:
        RuntimeError: nothing does.
    """
    return group._get_backend(device)


def set_patience(group: dist.ProcessGroup, patience: timedelta) -> None:
    """Let the operations of ``group`` wait that long."""
    _set_pg_timeout(patience, group)


def patience_of(backend: Any) -> timedelta | None:
    """How long the operations of a backend wait, where it says so."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def answer_calls(module: nn.Module, answer: Callable[..., Any]) -> None:
    """From now on ``module(...)`` is ``answer(call, ...)``, where ``call`` is what it was: with all its hooks."""
    module._call_impl = partial(answer, module._call_impl)  # type: ignore[method-assign]


def without_function_modes() -> Any:
    """Within: modes and subclasses that look at functions of torch see none."""
    return torch._C.DisableTorchFunction()
