"""Private names of torch: modules' contents, autograd's bookkeeping, dispatch modes, process groups.

Read and run with torch 2.13 to 2.15. FSDP2 and the split backward pass have their own files in this folder.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import (
    _composable_state as composable,
    _functional_collectives as functional_collectives,
    distributed_c10d,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes as without_dispatch_modes,
)
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from .lasting import replace_for_good
from .torch_device import ACCELERATOR

__all__ = [
    "TorchDispatchMode",
    "functional_collectives",
    "set_timeout",
    "tree_leaves",
    "tree_map",
]
__all__ += ["without_dispatch_modes"]

set_timeout: Callable[[timedelta, dist.ProcessGroup], None] = (
    getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
)
"""Set the timeout of a group's operations. torch has a public function since 2.14, where the private name warns."""

HOOKS = tuple(
    name for name, held in vars(nn.Module()).items() if isinstance(held, dict) and "hooks" in name
)
"""Names of a module's attributes that hold its hooks, one attribute per kind of hook."""


def _held_by(register: str) -> str:
    """Return the attribute in which an ``nn.Module`` stores the hooks that its method ``register`` adds, such as
    ``register_forward_hook``. It is found by adding a hook to an empty module.
    """
    probe = nn.Module()
    handle = getattr(probe, register)(lambda *_: None)
    return next(name for name in HOOKS if handle.id in vars(probe)[name])


_ON_OUTPUT = _held_by("register_forward_hook")
_AROUND = (
    _held_by("register_forward_pre_hook"),
    _ON_OUTPUT,
    _held_by("register_full_backward_pre_hook"),
    _held_by("register_full_backward_hook"),
)
_ON_BOTH_SIDES = attrgetter(*_AROUND)

# Names of the attributes that hold a module's contents.
CONTENTS = (
    "_parameters",
    "_buffers",
    "_modules",
    "training",
)


def before_iterators(loader: DataLoader[Any], function: Callable[[], None]) -> None:
    """Call ``function`` each time the loader is about to draw the seed of its workers."""
    stock = loader._get_iterator

    def get_iterator() -> Any:
        function()
        return stock()

    loader._get_iterator = get_iterator  # type: ignore[method-assign]


@contextmanager
def autocast_remembers() -> Iterator[None]:
    """Keep autocast's copies of trained weights from one use to the next until the outermost ``with`` block ends."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model was returned by ``torch.compile(model)``."""
    return hasattr(model, "_orig_mod")


# The public torch.nn.functional.scaled_mm runs another operator, which was not timed on GPUs.
scaled_mm = torch._scaled_mm


def operator_name(func: Any) -> str:
    """Return an operator's name, the same for all its overloads; empty if ``func`` is no operator."""
    name = getattr(func, "name", None)  # "aten::add.Tensor"
    return name().rpartition("::")[2].partition(".")[0] if callable(name) else ""


def allow_recompiles() -> None:
    """Let torch.compile keep up to 64 graphs per function or kind of layer, instead of running uncompiled after 8."""
    from torch.compiler import config

    replace_for_good(config, "recompile_limit", lambda limit: max(limit, 64))


# These are plain functions, because torch.compile does not trace attrgetters.


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the module's own dict of parameters by attribute; changes to the dict change the module. Unlike
    ``register_parameter``, the dict takes any tensor for a parameter, and it has all names of tied parameters.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own dict of buffers, by attribute; changes to it change the module."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's own dict of children by attribute, all names of shared children included; changes to the dict
    change the module.
    """
    return module._modules


children_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
"""Return :func:`own_modules`, for ``map`` over many modules."""
parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
"""Return :func:`own_parameters`, for ``map`` over many modules."""


def passes_otherwise(module: nn.Module) -> bool:
    """Return whether calling this module may compute something else than its class's ``forward``: it has forward hooks,
    or a ``forward`` of its own.
    """
    before, behind, *_ = _ON_BOTH_SIDES(module)
    return bool(before or behind or "forward" in vars(module))


def counts_forward_hooks(module: nn.Module) -> int:
    """Return the number of hooks on the output of ``module``."""
    return len(getattr(module, _ON_OUTPUT))


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks on the inputs and outputs of ``module``, and on their gradients."""
    kinds = _ON_BOTH_SIDES(module)
    return [hook for held in kinds for hook in held.values()] if any(kinds) else []


def is_hooked(module: nn.Module) -> bool:
    """Return whether ``module`` has hooks on its inputs, outputs or their gradients, in code that a
    compiler can trace.
    """
    held = vars(module)
    before, behind, back, gradients = _AROUND
    return bool(held[before] or held[behind] or held[back] or held[gradients])


def hooks_on(modules: Iterable[nn.Module]) -> list[int]:
    """Return the ids of all hooks on the inputs and outputs of ``modules``, and on their gradients."""
    return [*chain.from_iterable(chain.from_iterable(map(_ON_BOTH_SIDES, modules)))]


def forget_composed(module: nn.Module) -> None:
    """Remove FSDP2's record that it wraps ``module``; the record is separate from the changed class."""
    composable._module_state_mapping.pop(module, None)


def has_backward_hook(tensor: Tensor) -> bool:
    """Return whether a hook runs when the gradient of ``tensor`` is computed."""
    return bool(tensor._backward_hooks)


def has_accumulation_hook(tensor: Tensor) -> bool:
    """Return whether a hook runs when the gradient of ``tensor`` has been accumulated."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been written in place."""
    return tensor._version


def _holders(x: Any, references: int) -> tuple[int, ...]:
    """Return the numbers of objects that hold a tensor, its memory and, if it is a view, the tensor that it views;
    ``references`` is the number of Python's references to a gradient, and 0 for an input.
    """
    memory: int = torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    counts = (references, x._use_count(), memory)
    base = x._base
    return counts if base is None else (*counts, base._use_count())


class _Probe(torch.autograd.Function):
    """Count what holds an input and a gradient that autograd alone holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: set[Any]) -> Tensor:
        ctx.counts = counts
        counts.add(_holders(x, 0))
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.counts.add(_holders(grads[0], sys.getrefcount(grads[0])))
        return grads[0], None


@cache
def _counts_of_unshared() -> set[tuple[int, ...]]:
    """Return the counts of inputs and of gradients that nothing else holds. They depend on the versions of torch and
    Python, so they are measured: for results of products, and for views of such results. This happens in the middle of
    a pass, whose hooks on saved tensors must not see the tensors of the measurement.
    """
    counts = set[Any]()
    unseen = saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with without_dispatch_modes(), torch.enable_grad(), unseen:
        x = torch.ones(2, 2, requires_grad=True)
        for shape in ((2, 2), (1, 2, 2)):
            y = _Probe.apply((x @ torch.ones(2, 2)).view(shape), counts)
            (y.view(2, 2) @ torch.ones(2, 2)).sum().backward()
        y = _Probe.apply(x @ torch.ones(2, 2), counts)
        (y @ torch.ones(2, 2)).sum().backward()
    return counts


def is_unshared(x: Tensor, references: int = 0) -> bool:
    """Return whether nothing but the running autograd function holds ``x`` or its memory, so that it may be
    overwritten: no graph, no other tensor and, for a gradient, no variable of Python's.

    Args:
        x: in a ``forward``, its input; variables of Python's that hold it do not count. In a ``backward`` that has
            ``once_differentiable`` and receives ``*grads``, the gradient ``grads[0]``, of which no variable is made.
        references: ``sys.getrefcount(grads[0])`` for a gradient, 0 for an input.
    """
    computed = references > 0 or x.grad_fn is not None
    return computed and _holders(x, references) in _counts_of_unshared()


def storage_key(held: Tensor | torch.UntypedStorage) -> int:
    """Return the identity of a live tensor's storage, which also works on the meta device, where addresses are 0."""
    storage = held.untyped_storage() if isinstance(held, Tensor) else held
    return int(StorageWeakRef(storage).cdata)


def living_storage(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage to which a weak reference points; ``None`` if the storage has been freed."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost active pair of saved-tensor hooks."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks  # type: ignore[no-any-return]


def is_checkpointed() -> bool:
    """Return whether a forward pass is running under ``torch.utils.checkpoint``, as first pass or as recomputation.
    Between the two, the activations are not kept.
    """
    hooks = saved_tensor_hooks()
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off in the ``with`` block, on the CPU and on the accelerator."""
    with ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", ACCELERATOR)):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@lru_cache(maxsize=4096)
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(func, "_schema", None)
    arguments: Any = () if schema is None else schema.arguments
    # Schemas of c10d operators do not mark written arguments: all operators except ``send`` write their first argument.
    if getattr(func, "namespace", "") == "c10d":
        return () if operator_name(func) == "send" else ((0, arguments[0].name),)
    marks = (
        (index, argument.name, argument.alias_info) for index, argument in enumerate(arguments)
    )
    return tuple(
        (index, name) for index, name, alias in marks if alias is not None and alias.is_write
    )


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return those tensors among an operator's arguments that the operator writes into."""
    places = _written_arguments(func)
    given = [args[index] if index < len(args) else kwargs.get(name) for index, name in places]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)] if places else []


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Return the base tensor of a view; ``None`` if a tensor is no view."""

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the current backward pass on this thread, or -1."""


backward_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
"""Return whether the current backward pass keeps the graph's saved tensors (``retain_graph``)."""

function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
"""Return the active modes that intercept calls of torch's functions, the outermost first."""


_PACKET = type(torch.ops.aten.mm)
_OVERLOAD = type(torch.ops.aten.mm.default)


def operators_named(name: str) -> list[Any] | None:
    """Return the operators with this name: for ``aten.mm.default`` one operator, for ``aten.mm`` all overloads that do
    not write in place; ``None`` if the name is unknown.
    """
    operators: Any = torch.ops
    for part in name.removeprefix("torch.ops.").replace("::", ".").split("."):
        operators = getattr(operators, part, None)
    several = isinstance(operators, _PACKET)
    if not several and not isinstance(operators, _OVERLOAD):
        return None
    every = (
        [getattr(operators, overload) for overload in operators.overloads()]
        if several
        else [operators]
    )
    return [overload for overload in every if not overload._schema.is_mutable]


next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Return the number that autograd will give to the next node of this thread."""


def current_node_number() -> int:
    """Return the number of the autograd node that is running in the current backward pass."""
    return int(torch._C._current_autograd_node()._sequence_nr())


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the current backward pass, unless the pass raises."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def gradients_asked(ctx: Any) -> Sequence[bool]:
    """Return, for each input of an ``autograd.Function``, whether the current backward pass needs the input's gradient.
    ``ctx.needs_input_grad`` instead tells whether any backward pass through the graph may need it. Under torch.compile,
    ``needs_input_grad`` is returned, because compilers can trace it.
    """
    if torch.compiler.is_compiling():
        return ctx.needs_input_grad
    return [_runs(node) for node, _ in ctx.next_functions]


def _runs(node: Any) -> bool:
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient `autograd.grad` computes
        return True


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func``, or forward-mode differentiation, is active."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def tensor_without_memory(
    kind: type, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a ``Tensor`` subclass instance with a shape and a dtype, but no values."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


def as_plain_tensors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` as if subclasses of ``Tensor`` had no ``__torch_function__``."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def undo_compile(module: nn.Module) -> None:
    """Undo ``module.compile()``."""
    module._compiled_call_impl = None


schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Return the schema of an operator that a dispatch mode receives: arguments, mutations and results."""


def alike(tensors: list[Tensor]) -> list[tuple[list[Tensor], list[int]]]:
    """Group tensors by device and dtype, so that one foreach launch can process a group; return the groups, each with
    the indices of its tensors in the list.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[int]]] = {}
    for place, tensor in enumerate(tensors):
        same, places = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        same.append(tensor)
        places.append(place)
    return list(groups.values())


norms_of: Callable[
    [
        list[Tensor],
        float,
        torch.dtype,
    ],
    Sequence[Tensor],
] = torch._foreach_norm
"""Return the norm of each tensor of a list, in one launch; all tensors have the same device and dtype."""


def unscale_and_check(gradients: list[Tensor], factor: float) -> bool:
    """Multiply ``gradients`` by ``factor`` in place; return whether any entry is not finite. Synchronizes with the
    device.
    """
    overflows = {
        device: torch.zeros(1, device=device)
        for device in {gradient.device for gradient in gradients}
    }
    for same, _ in alike(gradients):
        device = same[0].device
        torch._amp_foreach_non_finite_check_and_unscale_(
            same, overflows[device], torch.full((), factor, device=device)
        )
    return any(bool(overflow) for overflow in overflows.values())


def copy_all(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of ``sources`` into the tensor at the same index, in one launch per device and dtype."""
    for same, places in alike(tensors):
        torch._foreach_copy_(same, [sources[place] for place in places])


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply ``tensors`` (of one device and dtype) by ``factor`` in place; the product is computed in at least 32
    bits.
    """
    first = tensors[0]
    if first.element_size() > 2:
        torch._foreach_mul_(tensors, factor.to(first))
        return
    # `_foreach_mul_` would round the factor to the tensors' dtype; the kernel that unscales gradients keeps it in 32
    # bits
    wide = factor.to(first.device, torch.float32)
    if first.dtype == torch.float16 or first.device.type == "cpu":
        torch._amp_foreach_non_finite_check_and_unscale_(
            tensors, torch.zeros(1, device=first.device), wide
        )
        return
    for tensor in tensors:  # CUDA's unscaling kernel takes no bfloat16: a launch each
        tensor.mul_(wide.reshape((1,) * tensor.ndim))


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of ``group`` for tensors on ``device``; raise RuntimeError if there is none."""
    return group._get_backend(device)


def patience_of(backend: Any) -> timedelta | None:
    """Return the timeout of a backend's operations, if there is one."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def answer_calls(module: nn.Module, answer: Callable[..., Any]) -> None:
    """Replace ``module(...)`` by ``answer(call, ...)``, where ``call`` is the original call with all hooks."""
    module._call_impl = partial(answer, module._call_impl)  # type: ignore[method-assign]


def kept_results(operators: Collection[Any]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return two dispatch modes for selective activation checkpointing: one for the first pass, which saves the results
    of ``operators``, and one for the recomputation, which reads them. Both modes ignore all other operators.

    torch's own modes instead require that both passes call every operator equally often. With experts' weights that are
    sharded over replicas this fails, because a layer may all-gather the weights in only one of the two passes.
    """
    first, again = create_selective_checkpoint_contexts(list(operators))
    return _Chosen(operators, first), _Chosen(operators, again)


class _Chosen(TorchDispatchMode):
    """Pass ``operators`` to ``mode``, and run all other operators directly."""

    def __init__(self, operators: Collection[Any], mode: TorchDispatchMode) -> None:
        super().__init__()
        self._operators = frozenset(operators)
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Ignore operators inside of compiled blocks, like torch's own modes."""
        return True

    def __enter__(self) -> Any:
        with self._mode:  # resets the counts of ``mode``
            pass
        return super().__enter__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Pass an operator to the wrapped mode if it is one of the chosen operators; otherwise run it directly."""
        if func in self._operators:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
