"""Torch's fake process group, and patches that let FSDP2 run on the meta device.

Read and run with torch 2.13. FSDP2 gets streams and events from the device's module, which the meta device lacks: they
are the CPU's, which wait for nothing. And it refuses meta weights as not loaded yet.
"""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from .replaced import attribute_replaced

_fsdp: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
META = torch.device("meta")
_BACKEND = "cpu:fake,meta:fake"


class _Stream(torch.cpu.Stream):
    """Provide a stream without asynchronous work; on a device other than the CPU, FSDP2 requires events."""

    def record_event(self, event: Any = None) -> Any:
        return event or torch.cpu.Event()


_module = SimpleNamespace(
    Stream=_Stream,
    Event=torch.cpu.Event,
    current_stream=lambda device=None: _Stream(),
    stream=nullcontext,
    is_initialized=lambda: True,
)


@contextmanager
def fake_process_group(world: int, rank: int) -> Iterator[None]:
    """Make this process one of ``world`` fake ranks, whose collectives return at once, inside the ``with`` block."""
    new_group = dist.new_group

    def fake_group(ranks: Any = None, backend: Any = None, **options: Any) -> Any:
        return _named(new_group(ranks, backend=_BACKEND, **options))

    with attribute_replaced(dist, "new_group", fake_group):
        dist.init_process_group(_BACKEND, store=FakeStore(), rank=rank, world_size=world)
        _named(dist.group.WORLD)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _named(group: Any) -> Any:
    """Return the group with a default backend; a group with backends by device warns that it has none."""
    if isinstance(group, dist.ProcessGroup):
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


@contextmanager
def meta_as_accelerator() -> Iterator[None]:
    """Let FSDP2 treat the meta device as an accelerator inside the ``with`` block."""
    device_of_mesh = _fsdp._get_device_from_mesh

    def device_from(mesh: Any) -> torch.device:
        return META if mesh.device_type == "meta" else device_of_mesh(mesh)

    with ExitStack() as stack:
        for owner, name, value in (
            (torch, "meta", _module),
            (_fsdp, "_get_device_from_mesh", device_from),
            (FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
        ):
            stack.enter_context(attribute_replaced(owner, name, value))
        yield


def group_of(arguments: Any) -> Any:
    """Return the process group in the arguments of a collective's operator; ``None`` if there is none."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    return None


def finished(func: Any, args: Any) -> Any:
    """Return the results of a collective's operator as if it had completed: its outputs unchanged."""
    work = FakeWork().boxed()
    made = [work if "Work" in str(value.type) else args[0] for value in func._schema.returns]
    return made[0] if len(made) == 1 else tuple(made)
