"""A process group that stages through gloo and is not called so: other backends' branches, with real numbers on a CPU.

What is done for NCCL and not for gloo (all-gathers and reduce-scatters as they are, groups by pairs, ...) runs here. On
a GPU the same group puts several ranks on one device, which NCCL refuses.
"""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

Arriving = list[tuple[Tensor, Tensor]]
"""Where results belong, and where gloo puts them."""


class _Work(dist.Work):
    """Results appear when it is waited for."""

    def __init__(self, work: Any, arriving: Arriving, kept: Any = None) -> None:
        super().__init__()
        self.work = work
        self.arriving = arriving
        self.kept = kept

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.work.wait()
        for target, found in self.arriving:
            target.detach().copy_(found)
        self.arriving = []
        self.kept = None
        return True

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def get_future(self) -> Any:
        self.wait()
        future: Future[Any] = Future()
        future.set_result([])
        return future


class Staged(dist.ProcessGroup):
    """Copies to the host, gloo, copies back.

    Args:
        late: outputs are full of NaN until they are waited for; else collectives return when they are done.
    """

    def __init__(self, inner: Any, rank: int, size: int, late: bool) -> None:
        super().__init__(rank, size)
        self.inner = inner
        self.late = late

    def getBackendName(self) -> str:
        return "late" if self.late else "staged"

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        return self.pg_name

    def _get_backend(self, device: torch.device) -> Any:
        """Return what torch 2.14 asks for before it batches transfers: one that cannot coalesce them."""
        return SimpleNamespace(supports_coalescing=False, name=str)

    def _started(
        self, work: Any, arriving: Arriving, kept: Any = None, transfer: bool = False
    ) -> _Work:
        found = _Work(work, arriving, kept)
        if not self.late and not transfer:
            found.wait()
        for target, _ in found.arriving:
            target.detach().fill_(_mark(target))
        return found

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        there = _copies(tensors)
        work = self.inner.allreduce(there, opts or dist.AllreduceOptions())
        return self._started(work, _pairs(tensors, there))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        there = _copies(tensors)
        return self._started(self.inner.broadcast(there, opts), _pairs(tensors, there))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> _Work:
        there = [[_like(each) for each in outputs[0]]]
        sent = _copies(inputs)
        return self._started(self.inner.allgather(there, sent), _pairs(outputs[0], there[0]), sent)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        parts = [_like(given) for _ in range(self.size())]
        return self.allgather_parts(list(output.detach().view(self.size(), -1)), parts, given)

    def allgather_parts(self, targets: list[Tensor], parts: list[Tensor], given: Tensor) -> _Work:
        sent = _copies([given])
        found = [part.view(-1) for part in parts]
        return self._started(self.inner.allgather([parts], sent), _pairs(targets, found), sent)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> _Work:
        there = _copies([given])
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        work = self.inner.allreduce(there, options)
        return self._started(work, [(output.view(-1), there[0].view(self.size(), -1)[self.rank()])])

    # torch 2.13's names
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: Tensor, given: Tensor, out: list[int], into: list[int], opts: Any = None
    ) -> _Work:
        there = _like(output)
        sent = _copies([given])
        work = self.inner.alltoall_base(there, sent[0], out, into, dist.AllToAllOptions())
        return self._started(work, [(output, there)], sent)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> _Work:
        sent = _copies(tensors)
        return self._started(self.inner.send(sent, rank, tag), [], sent, transfer=True)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> _Work:
        there = [_like(each) for each in tensors]
        return self._started(
            self.inner.recv(there, rank, tag), _pairs(tensors, there), transfer=True
        )

    def barrier(self, opts: Any = None) -> _Work:
        return self._started(self.inner.barrier(), [])


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [
        tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for tensor in tensors
    ]


def _pairs(tensors: list[Tensor], found: list[Tensor]) -> Arriving:
    return list(zip(tensors, found, strict=True))


def _mark(tensor: Tensor) -> Any:
    if tensor.is_floating_point():
        return float("nan")
    return True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max


def _maker(late: bool) -> Callable[..., Staged]:
    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Staged:
        inner = dist.ProcessGroupGloo(dist.PrefixStore("staged", store), rank, size, timeout)
        return Staged(inner, rank, size, late)

    return make


def staged() -> str:
    """Register the backend that returns when a collective is done."""
    dist.Backend.register_backend("staged", _maker(False), devices=["cpu", "cuda"])
    return "staged"


def late() -> str:
    """Register the backend whose outputs are full of NaN until they are waited for."""
    dist.Backend.register_backend("late", _maker(True), devices=["cpu", "cuda"])
    return "late"
