"""Streams of an accelerator on the CPU: numbers are right, and memory given back too early is found.

An accelerator's allocator hands memory that was freed to the next tensor of the stream that made it. That is right only
if this stream has waited for all other streams that used the memory, or if ``record_stream`` was called. Here streams
are vector clocks, and every operator is a use of its tensors on the stream that is current.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfscale._compat import torch_fsdp
from hfscale.features.fp8 import scaled_matmul as eight_bits
from hfscale.features.memory import stored

Clock = dict["Stream", int]
_TO = Tensor.to
_EMPTY_LIKE = torch.empty_like


class Event:
    """A moment of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seen: Clock = {}

    def record(self, stream: "Stream | None" = None) -> "Event":
        self.seen = dict((stream or torch.cpu.current_stream()).seen)  # type: ignore[attr-defined]
        return self

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or torch.cpu.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.wait()

    def query(self) -> bool:
        return True


class Stream:
    """What has ended, on every stream, before what comes next on this one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seen: Clock = {self: 0}

    def wait_event(self, event: Event) -> None:
        for stream, moment in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), moment)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)


class _Used:
    """A piece of memory that several streams have used."""

    def __init__(self, tensor: Tensor, home: Stream) -> None:
        self.reference = StorageWeakRef(tensor.untyped_storage())
        self.home = home
        self.shape, self.uses, self.recorded = (
            tuple(tensor.shape),
            dict[Stream, tuple[int, str]](),
            set[Stream](),
        )


class Lifetimes(TorchDispatchMode):
    """See :func:`lifetimes`.

    Attributes:
        crossed: how many pieces of memory were used on other streams than the one that made them.
        faults: what the allocator would have handed out too early.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossed, self.faults = 0, list[str]()
        self._home: dict[int, tuple[StorageWeakRef, Stream]] = {}
        self._used: dict[int, _Used] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._hand_out()
        stream: Any = torch.cpu.current_stream()
        stream.seen[stream] += 1
        for tensor in _tensors((args, kwargs)):
            self._use(tensor, stream, str(func))
        found = func(*args, **(kwargs or {}))
        for tensor in _tensors(found):
            self._home.setdefault(
                tensor.untyped_storage()._cdata, (StorageWeakRef(tensor.untyped_storage()), stream)
            )
        return found

    def record(self, tensor: Tensor, stream: Any = None) -> None:
        """In the place of ``record_stream``."""
        used = self._used.get(tensor.untyped_storage()._cdata)
        if used is None:
            used = self._start(tensor)
        if used is not None:
            used.recorded.add(stream or torch.cpu.current_stream())

    def _start(self, tensor: Tensor) -> _Used | None:
        key = tensor.untyped_storage()._cdata
        reference, home = self._home.get(key, (None, None))
        if reference is None or home is None or reference.expired():
            return None
        self.crossed += 1
        return self._used.setdefault(key, _Used(tensor, home))

    def _use(self, tensor: Tensor, stream: Stream, what: str) -> None:
        key = tensor.untyped_storage()._cdata
        reference, home = self._home.get(key, (None, None))
        if reference is not None and reference.expired():
            del self._home[key]
        elif home is not None and home is not stream:
            used = self._used.get(key) or self._start(tensor)
            if used is not None:
                used.uses[stream] = stream.seen[stream], what

    def _hand_out(self) -> None:
        """Memory that was freed is handed out again on its own stream, as soon as that makes something."""
        stream: Any = torch.cpu.current_stream()
        for key, used in list(self._used.items()):
            if used.home is stream and used.reference.expired():
                del self._used[key]
                for other, (moment, what) in used.uses.items():
                    if other not in used.recorded and stream.seen.get(other, 0) < moment:
                        self.faults.append(
                            f"{what} of {used.shape}: given back before its stream was waited for"
                        )


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """FSDP2's copy to the host and back, which a CPU would do without."""
    return tensor.clone() if "non_blocking" in kwargs else _TO(tensor, *args, **kwargs)


def _empty_like(tensor: Tensor, **kwargs: Any) -> Tensor:
    """Memory is pinned for accelerators only."""
    kwargs.pop("pin_memory", None)
    return _EMPTY_LIKE(tensor, **kwargs)


def _tensors(values: Any) -> list[Tensor]:
    plain = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf for leaf in plain if type(leaf) is not torch.distributed.tensor.DTensor]


@contextmanager
def lifetimes() -> Iterator[Lifetimes]:
    """Within: streams of FSDP2 and of offloading are told apart on the CPU, and memory is followed between them."""
    seen = Lifetimes()
    current = [Stream()]

    @contextmanager
    def within(stream: Stream | None) -> Iterator[None]:
        current.append(stream or current[-1])
        try:
            yield
        finally:
            current.pop()

    with ExitStack() as stack:
        for name, value in (
            ("Stream", Stream), ("Event", Event), ("stream", within), ("current_stream", lambda *_: current[-1])
        ):  # fmt: skip
            stack.enter_context(patch.object(torch.cpu, name, value))
        stack.enter_context(patch.object(Tensor, "to", _to))
        for module in (torch_fsdp, eight_bits, stored):
            stack.enter_context(patch.object(module, "keep_for_stream", seen.record))
        stack.enter_context(patch.object(stored, "is_accelerator", lambda _: True))
        stack.enter_context(
            patch.object(stored, "buffers_of", cache(stored.buffers_of.__wrapped__))
        )
        stack.enter_context(patch.object(torch, "empty_like", _empty_like))
        stack.enter_context(seen)
        yield seen
