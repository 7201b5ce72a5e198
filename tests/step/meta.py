"""A GPU without one: device ``meta`` in its place, among ranks that are not there.

A step runs as it does on GPUs, without numbers: it takes the branches that are not the CPU's, collectives are noted and
not sent, and where the host would wait for the device, it is given an answer that was made up.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfscale import mesh
from hfscale.runtime import runtime_of

from .collectives import DTYPES

GPU = torch.device("meta")
# Operators whose result has a size, or a number, that the host must know.
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
_MOVING = {"_to_copy", "copy_", "set_"}
Where = tuple[str, str]
"""An operator, and who called it."""


@dataclass
class Seen:
    """What one rank did.

    Attributes:
        looks: where the host waited for the device -> how often.
        calls: axis -> collectives over it; ``"host"`` are those between the hosts.
        sent: axis -> bytes that were handed to them.
        faults: what a GPU, or NCCL, would not have taken.
    """

    looks: Counter[Where] = field(default_factory=Counter)
    calls: dict[str, Counter[str]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@contextmanager
def pretended_gpus(world: int) -> Iterator[None]:
    """Within: this process is rank 0 of ``world``, on a device that has no numbers."""
    new_group, enabled = dist.new_group, torch.is_autocast_enabled

    def fake_group(ranks: Any = None, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, backend="cpu:fake,meta:fake", **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "own_device", lambda: GPU)
        patch.setattr(dist, "new_group", fake_group)
        patch.setattr(torch, "is_autocast_enabled", lambda *kind: enabled(*("cpu" if k == "meta" else k for k in kind)))
        if world > 1:
            dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=0, world_size=world)
        try:
            yield
        finally:
            if world > 1:
                dist.destroy_process_group()


@contextmanager
def watched(model: Any, answer: Callable[[Tensor], Tensor]) -> Iterator[Seen]:
    """Within: what ``model``'s rank does is noted.

    Args:
        answer: what the host finds where it looks at a tensor on the device.
    """
    seen, own = Seen(), runtime_of(model).mesh
    axes = {group.group_name: axis for axis in reversed(_axes(own)) if (group := own.group(axis)) is not None}
    axes.update({group.group_name: "stages" for group in own.streams.values()})
    with _Calls(seen), _Operators(seen, axes, answer):
        yield seen


def _axes(own: mesh.Mesh) -> list[str]:
    return ["pp", "dp_replicate", "dp_shard", "tp", *(["ep"] if own.expert_mesh is not None else [])]


class _Calls(TorchFunctionMode):
    """What torch does beneath its dispatcher: copies of Python's numbers to the device, which the host waits for."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor") and torch.device(kwargs.get("device") or "cpu") == GPU:
            self.seen.looks[name, _caller()] += 1
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, seen: Seen, axes: dict[str, str], answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.seen, self.axes, self.answer = seen, axes, answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "c10d":
            return self._collective(func, name, tensors, args, kwargs)
        here = [tensor for tensor in tensors if tensor.device == GPU]
        if name in _MOVING:
            return self._moved(func, name, args, kwargs)
        if here and any(tensor.ndim and tensor.device != GPU for tensor in tensors):
            self.seen.faults.append(f"{func} of tensors on the GPU and on the CPU: {_caller()}")
        if here and name in _WAITING:
            self.seen.looks[name, _caller()] += 1
            found = func(*(self.answer(a) if isinstance(a, Tensor) else a for a in args), **kwargs)
            return found.to(GPU) if isinstance(found, Tensor) else found
        if here and name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.seen.looks[name, _caller()] += 1
        return func(*args, **kwargs)

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A copy: from the GPU it is waited for; to it as well, unless somebody has said otherwise."""
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if source.device == target:
            return func(*args, **kwargs)
        if source.device == GPU:
            self.seen.looks[name, _caller()] += 1
            made = self.answer(source)
            return func(args[0], made, **kwargs) if name == "copy_" else func(made, **kwargs)
        if waits and source.numel():
            self.seen.looks[name, _caller()] += 1
        return func(*args, **kwargs)

    def _collective(self, func: Any, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        # the input is the second argument of what has an output
        source = args[1] if name.strip("_").startswith(("allgather", "reduce_scatter", "alltoall")) else args[0]
        given = [leaf for leaf in tree_leaves(source) if isinstance(leaf, Tensor)]
        axis = "host"
        if any(tensor.device == GPU for tensor in tensors):
            groups = [dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a)]
            axis = self.axes.get(groups[0].group_name, "others") if groups else "others"
            for tensor in tensors:
                if tensor.device != GPU or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
                    strides = tensor.stride()
                    self.seen.faults.append(f"{func} of {tensor.dtype} on {tensor.device}, {strides}: {_caller()}")
        self.seen.calls.setdefault(axis, Counter())[name.strip("_")] += 1
        self.seen.sent[axis] += sum(tensor.numel() * tensor.element_size() for tensor in given)
        if axis == "host":
            return func(*args, **kwargs)
        work = FakeWork().boxed()
        made = [work if "Work" in str(value.type) else args[0] for value in func._schema.returns]
        return made[0] if len(made) == 1 else tuple(made)


def _is_group(value: Any) -> bool:
    return "ProcessGroup" in str(value._type())


def _caller() -> str:
    """The line of hfscale or the host that the call under way comes from."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for package in ("/hfscale/", "/transformers/", "/peft/"):
            if package in path and "/tests/" not in path[path.rindex(package) :]:
                return f"{package[1:]}{path.rpartition(package)[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
