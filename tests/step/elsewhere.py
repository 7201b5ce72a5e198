"""A device that is neither the CPU nor CUDA's: its tensors are computed on the CPU, and never mixed with the CPU's.

What names a device, or makes a factor on the wrong one, fails here, with real numbers. torch's ``PrivateUse1`` is
registered in Python, once per process, and stays: only processes of their own have it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from hfscale.distributed import process_groups

NAME = "elsewhere"
_EVERY, _ATEN = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
MOVING = {"_to_copy", "copy_", "_local_scalar_dense", "set_"}
STRICT = ("_foreach", "_amp", "_fused", "_grouped_mm", "_scaled_mm")
"""Operators that take not even a single number from the CPU."""


class Elsewhere(Tensor):
    """A tensor of the device; ``here`` holds its numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Elsewhere":
        made: Any = Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.here = here
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Elsewhere({self.here!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator where its numbers are."""
    name = func.overloadpacket.__name__
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    away = [tensor for tensor in given if isinstance(tensor, Elsewhere)]
    target = kwargs.get("device")
    if kwargs.get("pin_memory"):  # of which there is none
        kwargs = {**kwargs, "pin_memory": False}
    if target is not None and (target := torch.device(target)).type == NAME:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif not away:
        return func(*args, **kwargs)
    if away and func.namespace == "aten" and name not in MOVING:
        strict = name.startswith(STRICT)
        mixed = [
            tensor
            for tensor in given
            if (tensor.ndim or strict) and not isinstance(tensor, Elsewhere)
        ]
        if mixed:
            raise RuntimeError(f"{func} is given tensors on {NAME} and on {mixed[0].device}")
    returns = target.type == NAME if target is not None else name != "_local_scalar_dense"
    if name == "copy_":
        returns = isinstance(args[0], Elsewhere)
    args, kwargs = tree_map_only(Elsewhere, lambda tensor: tensor.here, (args, kwargs))
    found = func(*args, **kwargs)
    same = {id(tensor.here): tensor for tensor in given if isinstance(tensor, Elsewhere)}
    wrap = Elsewhere if returns else lambda tensor: tensor
    return tree_map_only(
        Tensor, lambda tensor: same[id(tensor)] if id(tensor) in same else wrap(tensor), found
    )


class _Operators(TorchDispatchMode):
    """Tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What torch does beneath its dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if (
            func in (torch.tensor, torch.as_tensor)
            and device is not None
            and torch.device(device).type == NAME
        ):
            return func(*args, **kwargs | {"device": "cpu"}).to(device)
        if func in (Tensor.tolist, Tensor.data_ptr) and isinstance(args[0], Elsewhere):
            return func(args[0].here)
        if func == Tensor.data.__set__ and isinstance(args[0], Elsewhere):  # type: ignore[attr-defined]
            args[0].here = args[1].here
        return func(*args, **kwargs)


def register() -> str:
    """Register the device in this process, for its whole life; return the backend that its ranks talk through."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    dist.Backend.backend_capability["gloo"].append(NAME)
    _EVERY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("mm", "bmm", "addmm", "matmul", "linear", "scaled_dot_product_attention"):
        _ATEN.impl(name, _narrowed(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    return "gloo"


def _narrowed(operator: Any) -> Any:
    """Return an operator that casts as autocast does."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            return (
                tensor.to(torch.get_autocast_dtype(NAME))
                if tensor.dtype == torch.float32
                else tensor
            )

        with torch.autocast(NAME, enabled=False):
            return operator(
                *tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs)
            )

    return run


class _Event:
    """A moment of the device, which has passed."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream(_Event):
    """The device computes what it is told at once."""

    stream_id = device_index = device_type = 0

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class _Module(_DummyBackendModule):
    """torch's module for the device, which draws random numbers as the CPU does."""

    Stream, Event, stream = _Stream, _Event, staticmethod(nullcontext)
    default_generators = (torch.default_generator,)

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def init(self) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """Within: this process's models and batches are on the device, which is registered."""
    device = torch.device(NAME, 0)
    with ExitStack() as stack:
        stack.enter_context(patch.object(process_groups, "own_device", lambda: device))
        # Of gathered weights: there is no storage here.
        for name in (
            "alloc_storage",
            "free_storage",
        ):
            stack.enter_context(patch.object(_fsdp_param, name, lambda tensor: None))
        stack.enter_context(_Operators())
        stack.enter_context(_Functions())
        yield device
