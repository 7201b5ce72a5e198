"""Use torch's fake process group, and patch FSDP2 and autocast so that they run on the meta device.

Read and run with torch 2.13 to 2.15. FSDP2 needs the streams and events of a device, which the meta device lacks. It
gets the CPU's streams and events, which wait for nothing. FSDP2's check against meta weights, which takes them for
weights that were not loaded, is left out.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from .replaced import attribute_replaced
from .torch import base_of, storage_key, tree_map

_fsdp: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
META = torch.device("meta")
_BACKEND = "cpu:fake,meta:fake"


class _Stream(torch.cpu.Stream):
    """Stand for a stream of the meta device, without asynchronous work. FSDP2 calls ``record_event`` on the streams of
    every device other than the CPU.
    """

    # Attributes of torch.Stream that FSDP2 reads since torch 2.15, to note who reads a gradient; torch.cpu.Stream lacks
    # them.
    stream_id = 0
    device_index = 0
    device_type = 0

    def record_event(self, event: Any = None) -> Any:
        return event or torch.cpu.Event()


_module = SimpleNamespace(
    Stream=_Stream,
    Event=torch.cpu.Event,
    current_stream=lambda device=None: _Stream(),
    stream=nullcontext,
    is_initialized=lambda: True,
    device_count=lambda: 1,  # called since torch 2.14
)


@contextmanager
def fake_process_group(world: int, rank: int) -> Iterator[None]:
    """Make this process one of ``world`` fake ranks inside the ``with`` block; their collectives return at once."""
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
    """Set a default backend for a process group, and return the group: torch warns of groups that have a backend for
    each device but no default.
    """
    if isinstance(group, dist.ProcessGroup):
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


@contextmanager
def meta_as_accelerator() -> Iterator[None]:
    """Let FSDP2 treat the meta device as an accelerator inside the ``with`` block."""
    device_of_mesh = _fsdp._get_device_from_mesh

    def device_from(mesh: Any) -> torch.device:
        return META if mesh.device_type == "meta" else device_of_mesh(mesh)

    with (
        attribute_replaced(torch, "meta", _module),
        attribute_replaced(_fsdp, "_get_device_from_mesh", device_from),
        attribute_replaced(FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
    ):
        yield


def group_of(arguments: Any) -> Any:
    """Return the process group among the arguments of a collective's operator; ``None`` if there is none."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):  # raised for other objects: a reduction, a work
                return dist.ProcessGroup.unbox(argument)
    return None


def finished(func: Any, args: Any) -> Any:
    """Return the results of a collective's operator as if it had completed, with unchanged output tensors."""
    work = FakeWork().boxed()
    made = [work if "Work" in str(value.type) else args[0] for value in func._schema.returns]
    return made[0] if len(made) == 1 else tuple(made)


_NARROWED = {
    "linear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "mv",
    "einsum",
    "chain_matmul",
    "addmm",
    "addmv",
    "addbmm",
    "baddbmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "prelu",
    "scaled_dot_product_attention",
    "grouped_mm",
    "_grouped_mm",
}
_WIDENED = {
    "pow",
    "__pow__",
    "rsqrt",
    "reciprocal",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "softplus",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "norm",
    "softmax",
    "log_softmax",
    "logsumexp",
    "sum",
    "prod",
    "cumsum",
    "cumprod",
}
_CAST = (torch.float32, torch.float16, torch.bfloat16)


class _Casts(TorchFunctionMode):
    """Cast like autocast: arguments of the functions in ``_NARROWED`` to ``dtype``, and with ``widens`` arguments of
    the functions in ``_WIDENED`` to 32 bits. Record the copies of weights in ``copies``.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        widens: bool,
        copies: dict[int, StorageWeakRef],
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self._widens = widens
        self._copies = copies
        self._of_weights: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        given = (args, kwargs or {})
        if name in _NARROWED:
            given = tree_map(self._narrowed, given)
        elif self._widens and name in _WIDENED:
            given = tree_map(
                lambda t: t.float() if isinstance(t, Tensor) and t.dtype in _CAST else t, given
            )
        result = func(*given[0], **given[1])
        # Model code may itself cast a weight to autocast's dtype: this copy is recorded too.
        if name == "to" and _is_weight(args[0]) and result is not args[0]:
            self._note(result)
        return result

    def _narrowed(self, tensor: Any) -> Any:
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype not in _CAST
            or tensor.dtype == self._dtype
        ):
            return tensor
        if not _is_weight(tensor):
            return tensor.to(self._dtype)
        if not tensor.is_leaf:  # autocast casts a view at each use
            return self._note(tensor.to(self._dtype))
        if id(tensor) not in self._of_weights:
            self._of_weights[id(tensor)] = tensor, self._note(tensor.to(self._dtype))
        return self._of_weights[id(tensor)][1]

    def _note(self, copy: Tensor) -> Tensor:
        storage = copy.untyped_storage()
        self._copies[storage_key(storage)] = StorageWeakRef(storage)
        return copy


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight, trained or frozen, or a view of one."""
    base = base_of(tensor)
    weight = tensor if base is None else base
    return weight.is_leaf and (weight.requires_grad or isinstance(weight, nn.Parameter))


@contextmanager
def autocast_on_meta(like: str) -> Iterator[dict[int, StorageWeakRef]]:
    """Let autocast on the meta device act like autocast on ``like`` (``"cpu"`` or ``"cuda"``) inside the ``with``
    block.

    The block gets a dict that lists the low-precision copies of weights that autocast has made so far:
    :func:`storage_key` of a copy -> weak reference to its storage. Arguments are cast for those functions of torch's
    lists (Autocast Op Reference) that language models use.
    """
    autocast = torch.autocast
    enabled = torch.is_autocast_enabled
    chosen = torch.get_autocast_dtype
    active: list[torch.dtype] = []
    copies: dict[int, StorageWeakRef] = {}

    @contextmanager
    def casting(dtype: torch.dtype) -> Iterator[None]:
        with _Casts(dtype, like != "cpu", copies):
            active.append(dtype)
            try:
                yield
            finally:
                active.pop()

    def of(
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: Any = None,
    ) -> Any:
        if device_type != "meta":
            return autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        return casting(dtype or torch.bfloat16)

    def is_enabled(*kind: str) -> bool:
        return bool(active) if kind == ("meta",) else enabled(*kind)

    def dtype_of(kind: str) -> torch.dtype:
        return (
            active[-1] if kind == "meta" and active else chosen("cpu" if kind == "meta" else kind)
        )

    with (
        attribute_replaced(torch, "autocast", of),
        attribute_replaced(torch, "is_autocast_enabled", is_enabled),
        attribute_replaced(torch, "get_autocast_dtype", dtype_of),
    ):
        yield copies
