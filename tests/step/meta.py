"""A GPU without one: a simulated rank, with a note of where the host waits and what collectives take."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hfscale._compat.torch import tree_leaves
from hfscale._compat.torch_fake import group_of
from hfscale.cost.tools.simulated_rank import (
    HOST,
    INPUT_SECOND,
    META,
    MOVING,
    OTHERS,
    WAITING,
    Answer,
    SimulatedRank,
    simulated_rank as pretended_gpus,
)
from hfscale.train.runtime import runtime_of

from .collectives import DTYPES

__all__ = ["GPU", "Seen", "pretended_gpus", "watched"]

GPU = META
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
        order: looks and collectives over tensors on the device, one after the other.
    """

    calls: dict[str, Counter[str]]
    sent: Counter[str] = field(default_factory=Counter)
    looks: Counter[Where] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)


@contextmanager
def watched(model: Any, answer: Answer) -> Iterator[Seen]:
    """Within: what ``model``'s rank does is noted.

    Args:
        answer: what the host finds where it looks at a tensor on the device.
    """
    operators = _Operators(runtime_of(model), answer)
    with _Calls(operators.seen), operators:
        yield operators.seen


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


class _Operators(SimulatedRank):
    def __init__(self, runtime: Any, answer: Answer) -> None:
        super().__init__(runtime, answer)
        self.seen = Seen(self.traffic.calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        tensors = _tensors((args, kwargs))
        if func.namespace == "c10d":
            self._note_collective(func, name.strip("_"), args, tensors)
        elif name in MOVING:
            self._note_copy(name, args, kwargs)
        elif any(tensor.device == GPU for tensor in tensors):
            if any(tensor.ndim and tensor.device != GPU for tensor in tensors):
                self.seen.faults.append(f"{func} of tensors on the GPU and on the CPU: {_caller()}")
            if name in WAITING or (
                name == "index" and any(i.dtype == torch.bool for i in _tensors(args[1]))
            ):
                self._note_look(name)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_look(self, name: str) -> None:
        self.seen.looks[name, _caller()] += 1
        self.seen.order.append("look")

    def _note_copy(self, name: str, args: Any, kwargs: Any) -> None:
        into = name == "copy_"
        source = args[into]
        target = args[0].device if into else kwargs.get("device") or args[0].device
        waits = not (kwargs.get("non_blocking") or (into and len(args) > 2 and args[2]))
        if source.device == target:
            return
        # What is written into memory that is there, pinned, comes later; what comes from the device otherwise, now.
        if (waits and (source.numel() or source.device == GPU)) or (
            source.device == GPU and not into
        ):
            self._note_look(name)

    def _note_collective(self, func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
        group = group_of(args)
        axis = HOST
        if any(tensor.device == GPU for tensor in tensors):
            axis = OTHERS if group is None else self._axes.get(group.group_name, OTHERS)
            self.seen.order.append(name)
            for tensor in tensors:
                if tensor.device != GPU or not tensor.is_contiguous() or tensor.dtype not in DTYPES:
                    strides = tensor.stride()
                    self.seen.faults.append(
                        f"{func} of {tensor.dtype} on {tensor.device}, {strides}: {_caller()}"
                    )
        given = _tensors(args[1] if name.startswith(INPUT_SECOND) else args[0])
        self.seen.sent[axis] += sum(tensor.numel() * tensor.element_size() for tensor in given)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _caller() -> str:
    """The line of hfscale or the host that the call under way comes from."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for package in ("/hfscale/", "/transformers/", "/peft/"):
            inside = path[path.rindex(package) :] if package in path else "/tests/"
            if "/tests/" not in inside and not inside.endswith("/cost/tools/simulated_rank.py"):
                return f"{package[1:]}{path.rpartition(package)[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
