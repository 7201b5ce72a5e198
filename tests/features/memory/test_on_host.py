"""Copies to the host and back: who waits for whom, and in which buffers, by streams that only record."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import hfscale
from hfscale import MemoryConfig
from hfscale.distributed import host_buffers
from hfscale.features.memory import stored

from ...tiny_models import tiny

LOG = list[tuple[str, str]]


class Recorded:
    """A stream that writes down what is asked of it; an event is the stream's name and a number."""

    def __init__(self, name: str, log: LOG) -> None:
        self.name = name
        self._log = log
        self._count = 0

    def wait_stream(self, other: "Recorded") -> None:
        self._log.append((self.name, f"after {other.name}"))

    def wait_event(self, event: "Event") -> None:
        self._log.append((self.name, f"after {event.name}"))

    def recorded(self) -> str:
        self._count += 1
        self._log.append((self.name, f"copies {self._count}"))
        return f"{self.name} {self._count}"


class Event:
    def record(self, stream: Recorded) -> None:
        self.name = stream.recorded()

    def synchronize(self) -> None:
        """Nothing is late here."""


class Streams:
    """Torch's module for a device that has streams, as far as copies ask it."""

    def __init__(self) -> None:
        self.log, self.pinned = LOG(), list[int]()
        self._names = iter(("outward", "inward"))
        self._compute = Recorded("compute", self.log)

    Event = Event

    def Stream(self, device: torch.device) -> Recorded:
        return Recorded(next(self._names), self.log)

    def current_stream(self, device: torch.device) -> Recorded:
        return self._compute

    def stream(self, stream: Recorded) -> Any:
        return nullcontext()

    def bytes(self, size: int, device: torch.device) -> torch.Tensor:
        self.pinned.append(size)
        return torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Streams()
    monkeypatch.setattr(stored, "is_accelerator", lambda device: True)
    monkeypatch.setattr(host_buffers, "device_module", lambda device: found)
    monkeypatch.setattr(host_buffers, "pinned_bytes", found.bytes)
    host_buffers.buffers_of.cache_clear()
    yield found
    host_buffers.buffers_of.cache_clear()


def step(model: Any, tokens: int = 32) -> list[torch.Tensor]:
    ids = torch.randint(3, 60, (2, tokens), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    return [parameter.grad.clone() for parameter in model.parameters()]


def built(**memory: Any) -> Any:
    config = tiny("llama", num_hidden_layers=4)
    return hfscale.from_config(
        config, memory=MemoryConfig(recompute="full", **memory), dtype=torch.float32
    ).train()


def test_copies_run_beside_each_other_and_wait_by_events(streams: Streams) -> None:
    plain = step(built())
    model = built(offload_activations="64")
    log = streams.log
    # The last gradient of a layer is that of its first norm.
    for number, layer in enumerate(model.model.layers):
        done = ("compute", f"done with layer {number}")
        layer.input_layernorm.weight.register_post_accumulate_grad_hook(
            lambda _, done=done: log.append(done)
        )
    for _ in range(2):
        log.clear()
        assert all(map(torch.equal, step(model), plain))
    # Of the second step, whose buffers were read by the copies back of the first.
    asked = {
        lane: [what for name, what in log if name == lane]
        for lane in ("outward", "inward", "compute")
    }
    orders = (("after inward {}", "after compute", "copies {}"), ("after outward {}", "copies {}"))
    assert asked["outward"] == [
        each.format(n + 4 * ("copies" in each)) for n in range(1, 5) for each in orders[0]
    ]
    assert asked["inward"] == [
        each.format(n if "copies" in each else 13 - n) for n in range(5, 9) for each in orders[1]
    ]
    waits = [what for what in asked["compute"] if what.startswith("after")]
    assert waits == [f"after inward {n}" for n in range(5, 9)]
    # The copy back of the layer before runs under the backward pass of this one.
    for number in (
        3,
        2,
        1,
    ):
        assert log.index(("inward", f"copies {9 - number}")) < log.index(
            ("compute", f"done with layer {number}")
        )


def test_buffers_are_exact_reused_and_bounded(streams: Streams) -> None:
    model = built(offload_activations="64")
    stream = 2 * 32 * 32 * 4
    step(model)
    assert streams.pinned == [stream] * 4
    step(model)
    assert len(streams.pinned) == 4
    buffers = host_buffers.buffers_of(torch.device("cpu"))
    for tokens in (16, 48, 20):
        step(model, tokens)
        assert buffers.total == sum(len(each) for each, _ in buffers._free)
        assert buffers.total <= 1.25 * buffers.most
