"""Copies of an offloaded optimizer under its steps: their order and bytes, and who waits for whom, by vector clocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hfscale
from hfscale import MemoryConfig
from hfscale.distributed import host_buffers
from hfscale.distributed.host_buffers import bytes_before
from hfscale.optim import offloaded

from ..step.streams import Event, Stream
from ..tiny_models import tiny
from .cases import CONFIGS, make, run

LOG = list[tuple[str, int]]


class Machine(TorchDispatchMode):
    """A host, and a device with streams, whose tensors are the CPU's: torch's module for it.

    Attributes:
        log: copies into pinned buffers and out of them, with their bytes, and steps of the host in between.
        faults: uses of a buffer that are not behind its last writer, or its last reader.
    """

    Stream = Stream

    def __init__(self) -> None:
        super().__init__()
        self.host, self.compute, self.log, self.faults = Stream(), Stream(), LOG(), list[str]()
        self.pinned: dict[int, list[tuple[Stream, int, bool]]] = {}
        self.sizes, self._kept, self._current = list[int](), list[Tensor](), self.host

    def Event(self) -> Event:
        made = Event()
        made.synchronize = lambda: self.host.wait_event(made)  # type: ignore[method-assign]
        return made

    def current_stream(self, device: torch.device) -> Stream:
        return self.compute

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        stream.wait_stream(self.host)  # it is told now
        self._current, before = stream, self._current
        yield
        self._current = before

    def bytes(self, size: int, device: torch.device) -> Tensor:
        made = torch.empty(size, dtype=torch.uint8)
        self.pinned[made.untyped_storage()._cdata] = []
        self.sizes.append(size)
        self._kept.append(made)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(
            each.alias_info and not each.alias_info.is_write for each in func._schema.returns
        )
        untouched = views or func.overloadpacket.__name__ == "new_empty"
        for place, given in enumerate(() if untouched else args):
            info = func._schema.arguments[place].alias_info
            for tensor in tree_leaves(given):
                if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self.pinned:
                    self._use(func, tensor, bool(info and info.is_write))
        return func(*args, **(kwargs or {}))

    def _use(self, func: Any, tensor: Tensor, writes: bool) -> None:
        actor = self._current
        uses = self.pinned[tensor.untyped_storage()._cdata]
        if actor is not self.host:
            self.log.append(("down" if writes else "up", tensor.numel() * tensor.element_size()))
        elif self.log[-1] != ("step", 0):
            self.log.append(("step", 0))
        actor.seen[actor] += 1
        if any(
            actor.seen.get(other, 0) < moment for other, moment, wrote in uses if writes or wrote
        ):
            self.faults.append(f"{func} at {len(self.log)}")
        uses.append((actor, actor.seen[actor], writes))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(host_buffers, "device_module", lambda device: found)
    monkeypatch.setattr(host_buffers, "pinned_bytes", found.bytes)
    monkeypatch.setattr(offloaded, "_BUCKET", 8 << 10)
    return found


def trained(machine: Machine | None, dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
    """The optimizer and weights after two steps; in the first, a parameter has no gradient."""
    memory = MemoryConfig(offload_optimizer=machine is not None)
    model = hfscale.from_config(
        tiny("llama", num_hidden_layers=1), memory=memory, dtype=dtype, seed=1
    ).train()
    given = {"stochastic_rounding": True} if dtype == torch.bfloat16 else {}
    optimizer = hfscale.create_optimizer(model, "adamw_torch", lr=1e-2, weight_decay=0.1, **given)
    ids = torch.arange(24).view(2, 12)
    for step in range(2):
        hfscale.train_step(model, {"input_ids": ids + step, "labels": ids + step})
        if step == 0:
            model.model.norm.weight.grad = None
        if machine is None:
            optimizer.step()
        else:
            machine.log.clear()
            machine.compute.seen[machine.compute] += 1
            with machine:
                optimizer.step()
        optimizer.zero_grad()
    return optimizer, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_run_under_steps(machine: Machine, dtype: torch.dtype) -> None:
    """The next part comes down before this one is stepped; every buffer is written behind its readers."""
    optimizer, weights = trained(machine, dtype)
    assert all(map(torch.equal, weights, trained(None, dtype)[1]))
    assert not machine.faults
    (stepper, *_) = optimizer._steppers
    parts = [[member.weight.shape for member, _ in inner.pairs] for inner in stepper._inners]
    assert {1, 2} < {len(part) for part in parts} | {1, 2}  # some are stepped together
    down = list[LOG]()
    up = list[LOG]()
    for part in parts:
        forms = [(shape, torch.float32) for shape in part]
        each = bytes_before(forms)[-1]
        every = bytes_before(2 * forms)[-1]
        down.append([("down", every)] if len(part) > 1 else [("down", 4 * part[0].numel())] * 2)
        up.append([("up", each if len(part) > 1 else 4 * part[0].numel())])
    expected = [*down[0]]
    for place, back in enumerate(up):
        expected += [*(down[place + 1] if place + 1 < len(parts) else []), ("step", 0), *back]
    if dtype == torch.float32:
        assert machine.log == expected
    else:  # what goes up is rounded there, which on a CPU reads it some times more
        assert [name for name, _ in groupby(machine.log, itemgetter(0))] == [
            name for name, _ in groupby(expected, itemgetter(0))
        ]
    assert len(machine.sizes) == 2  # for all steps
    lanes = stepper._pair.lanes
    assert lanes.outward.seen[machine.compute] == machine.compute.seen[machine.compute]
    assert machine.compute.seen[lanes.inward] == lanes.inward.seen[lanes.inward]


def test_all_steppers_of_an_optimizer_copy_through_two_buffers(machine: Machine) -> None:
    """bitsandbytes' optimizers have up to three, for states in 8 bits of shards and of full tensors, and in 32 bits."""
    model = hfscale.from_config(
        CONFIGS["rows"](), memory=MemoryConfig(offload_optimizer=True), seed=1
    )
    optimizer = make(model, "adamw_8bit")
    stepped = [stepper for stepper in optimizer._steppers if stepper.members]
    with machine:
        run(model, "rows", optimizer, range(2))
    assert len(stepped) > 1
    assert len(machine.sizes) == 2
    assert not machine.faults


@pytest.mark.parametrize("forgotten", ["the buffer's reader", "the copy down"])
def test_what_the_clocks_find(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    if forgotten == "the copy down":
        monkeypatch.setattr(machine, "Event", Event)  # which the host does not wait for
    else:
        monkeypatch.setattr(
            host_buffers.HostBuffers,
            "give",
            lambda lanes, buffer, _: lanes._free.append((buffer, Event())),
        )
    trained(machine, torch.float32)
    assert machine.faults


@pytest.mark.daily("adamw_8bit")
@pytest.mark.parametrize(
    "name", ["adamw_8bit", "ademamix_8bit", "lion_32bit", "adagrad", "rmsprop", "sgd"]
)
def test_parts_are_stepped_as_single_parameters_are(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(offloaded, "_BUCKET", 8 << 10)
    found = []
    for offload in (False, True):
        model = hfscale.from_config(
            CONFIGS["rows"](), memory=MemoryConfig(offload_optimizer=offload), seed=1
        )
        optimizer = make(model, name)
        run(model, "rows", optimizer, range(2))
        found.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_step_that_fails_leaves_no_copy_under_way(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for both streams, lets the buffers go, and the next step is a whole one."""
    optimizer, _ = trained(machine, torch.float32)
    (stepper, *_) = optimizer._steppers
    for parameter in (member.parameter for inner in stepper._inners for member, _ in inner.pairs):
        parameter.grad = torch.ones_like(parameter)

    def fails(*_: Any) -> None:
        raise MemoryError

    lanes = stepper._pair.lanes
    with monkeypatch.context() as patch:
        patch.setattr(offloaded.StockOverStandIns, "step", fails)
        with machine, pytest.raises(MemoryError):
            optimizer.step()
    for stream in (lanes.outward, lanes.inward):
        assert machine.host.seen[stream] >= stream.seen[stream] > 0
    assert stepper._pair.lanes is None
    with machine:
        optimizer.step()
    assert not machine.faults
