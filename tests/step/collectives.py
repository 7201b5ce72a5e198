"""Collectives that show mistakes which a fast CPU hides: tensors used before they have arrived, or changed before they
have left; tensors and types that other backends do not take; a backward pass that runs on a thread of its own.
"""

import inspect
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfscale.distributed.ops import collectives

# What NCCL sends.
DTYPES = {
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool,
}  # fmt: skip
# collective -> names of its output and its input, among its parameters
_COLLECTIVES = {
    "all_reduce": ("tensor", "tensor"),
    "all_to_all_single": ("output", "input"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "reduce_scatter_tensor": ("output", "input"),
    "reduce_scatter_single": ("output", "input"),
    "broadcast": ("tensor", "tensor"),
}


class RaceError(AssertionError):
    """A tensor was touched while a collective had it."""


class _Slow:
    """Work whose result appears at ``wait()``, or with somebody else's: until then the output is full of NaN."""

    def __init__(
        self,
        name: str,
        source: Tensor,
        target: Tensor | None,
        hidden: Tensor | None,
        works: list[Any],
    ) -> None:
        self.name = name
        self.source = source
        self.target = target
        self.hidden = hidden
        self.works = works
        shared = (
            target is not None
            and target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        )
        self.before = None if shared else source.clone()
        self.ended = False
        if target is not None:
            target.detach().fill_(_mark(target))

    def wait(self, timeout: Any = None) -> bool:
        self.races.wait_for(self)
        return True

    races: "Races"

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        for work in self.works:
            work.wait()
        if self.before is not None and not torch.equal(self.source, self.before):
            raise RaceError(f"{self.name}: its input was changed before it had been sent")
        if self.target is not None and self.hidden is not None:
            if not torch.equal(
                _bits(self.target), _bits(torch.full_like(self.target, _mark(self.target)))
            ):
                raise RaceError(f"{self.name}: its output was written to before it had arrived")
            self.target.detach().copy_(self.hidden)


class Races:
    """Stands in for asynchronous collectives; see :func:`races`."""

    def __init__(self, seed: int) -> None:
        self.random, self.open, self.seen = random.Random(seed), list[_Slow](), Counter[str]()

    def collective(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature, (out, into) = inspect.signature(function), _COLLECTIVES[name]

        def run(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if not bound.arguments.get("async_op"):
                return function(*args, **kwargs)
            source = bound.arguments[into]
            target = bound.arguments[out]
            sent = source.detach().clone()
            hidden = sent if into == out else torch.empty_like(target)
            bound.arguments.update({into: sent, out: hidden})
            return self._keep(
                _Slow(name, source, target, hidden, [function(*bound.args, **bound.kwargs)])
            )

        return run

    def point_to_point(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(operations: list[Any]) -> list[Any]:
            works = []
            for given in operations:
                sends = given.op is dist.isend
                hidden = given.tensor.detach().clone()
                started = function([dist.P2POp(given.op, hidden, given.peer, given.group)])
                name, target = ("isend", None) if sends else ("irecv", given.tensor)
                works.append(self._keep(_Slow(name, given.tensor, target, hidden, started)))
            return works

        return run

    def _keep(self, slow: _Slow) -> _Slow:
        slow.races = self
        self.open.append(slow)
        self.seen[slow.name] += 1
        return slow

    def wait_for(self, slow: _Slow) -> None:
        """End ``slow``, and of the others that nobody sends from a rank still to come, some, in any order."""
        others = [
            other
            for other in self.open
            if other is not slow and other.name not in ("isend", "irecv")
        ]
        ending = [*self.random.sample(others, self.random.randint(0, len(others))), slow]
        self.random.shuffle(ending)
        for one in ending:
            one.end()
        self.open = [one for one in self.open if not one.ended]


@contextmanager
def races(seed: int) -> Iterator[Races]:
    """Within: what asynchronous collectives give out is NaN until it is waited for, and what they were given must stay
    as it was; they end in a random order.

    Raises:
        RaceError: a collective's tensors were changed while it was under way, or it was never waited for.
    """
    found = Races(seed)
    before = {name: getattr(dist, name) for name in (*_COLLECTIVES, "batch_isend_irecv")}
    aliases = {
        name: getattr(collectives, name) for name in ("all_gather_single", "_reduce_scatter")
    }
    for name in before.keys() & _COLLECTIVES.keys():
        setattr(dist, name, found.collective(name, before[name]))
    dist.batch_isend_irecv = found.point_to_point(before["batch_isend_irecv"])
    for name, function in aliases.items():
        setattr(collectives, name, found.collective(function.__name__, function))
    try:
        yield found
        if found.open:
            raise RaceError(f"never waited for: {[slow.name for slow in found.open]}")
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
        for name, function in aliases.items():
            setattr(collectives, name, function)


def _mark(x: Tensor) -> Any:
    return (
        float("nan")
        if x.is_floating_point()
        else (True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)
    )


def _bits(x: Tensor) -> Tensor:
    return (
        x.detach().contiguous().view(torch.uint8)
        if x.ndim
        else x.detach().view(1).view(torch.uint8)
    )


class _Strict(TorchDispatchMode):
    """Refuses collectives on tensors that some backend does not take as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            for tensor in (
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            ):
                assert tensor.is_contiguous(), (
                    f"{func}: {tuple(tensor.shape)} with strides {tensor.stride()}"
                )
                assert tensor.dtype in DTYPES, f"{func}: {tensor.dtype}"
        return func(*args, **(kwargs or {}))


@contextmanager
def strict() -> Iterator[None]:
    """Within: collectives get contiguous tensors of types that every backend sends."""
    with _Strict(), torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def backward_on_a_thread() -> Iterator[Counter[str]]:
    """Within: every backward pass runs on a fresh thread, as it does for tensors on GPUs."""
    names = ("backward", "grad")
    used = Counter[str]()
    before = {name: getattr(torch.autograd, name) for name in names}

    def elsewhere(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            done: list[Any] = []

            def work() -> None:
                try:
                    done.append((True, before[name](*args, **kwargs)))
                except BaseException as error:
                    done.append((False, error))

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            used[name] += 1
            succeeded, result = done[0]
            if not succeeded:
                raise result
            return result

        return run

    for name in names:
        setattr(torch.autograd, name, elsewhere(name))
    try:
        yield used
    finally:
        for name in names:
            setattr(torch.autograd, name, before[name])
