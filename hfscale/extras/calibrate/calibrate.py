"""Measure a machine for :func:`hfscale.estimate`: matmuls, attention, copies, a layer, the loss, the optimizer.

The constants come from one stock LLaMA layer with the shapes of :class:`Sizes`. The time of its forward and backward
pass minus matrix products and attention is elementwise work. With only a few tokens, the time is the CPU's
time for launching kernels. Without a GPU, one processor launches and computes, so both times add up.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils.benchmark.utils.timer import Timer, timer as default_timer
from transformers import LlamaConfig, LlamaModel

from ..._compat.torch_device import accelerators, device_module, is_accelerator
from ...config.parallel import ParallelConfig
from ...cost.model.job import Job
from ...cost.model.machines_known import Constants, Machine, fitted
from ...cost.model.model_shape import ModelShape
from ...cost.model.step_time import layer_seconds

_TINY = 4  # so few tokens that a layer's time is only the time of launching its kernels
_SHARED = 64  # assumed ranks per node on machines without GPUs, so that all ranks count as being on one node
_UNKNOWN_LINK = 1e9
_UNKNOWN_LATENCY = 1e-4


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes of the layer to time, and the seconds that one measurement takes."""

    hidden: int = 512  # width of the hidden states
    ffn: int = 1376  # width inside the MLP
    heads: int = 8
    sequence: int = 512  # tokens of a sequence
    batch: int = 4  # sequences
    vocabulary: int = 8192
    seconds: float = 2.0  # about the duration of one measurement

    @property
    def shape(self) -> ModelShape:
        """The sizes of the layer as a :class:`ModelShape`, from which the time model computes."""
        return ModelShape(1, self.hidden, self.hidden, self.hidden, self.ffn, self.vocabulary)


GPU_SIZES = Sizes(4096, 14336, 32, 4096, 1, 32000)


def calibrate(
    name: str,
    device: torch.device,
    links: tuple[float, float]
    | None = None,  # bandwidth (bytes/s) of a large all-reduce, and seconds of a small one
    sizes: Sizes
    | None = None,  # sizes of the layer; by default LLaMA 8B's on a GPU, and small on a CPU
    reference: Machine | None = None,  # gives the links if they were not measured
) -> dict[str, Any]:
    """Measure this machine; return a document for ``hardware=`` that describes the machine and its constants.

    ``links``: the bandwidth (bytes/s) of a large all-reduce and the seconds of a small one; if they were not measured,
    the bandwidth is that of ``reference``. ``sizes``: sizes of the layer to time, by default LLaMA 8B's on a GPU and
    small ones on a CPU.
    """
    chosen = sizes or (GPU_SIZES if is_accelerator(device) else Sizes())
    dtype = torch.bfloat16 if is_accelerator(device) else torch.float32
    meter = _Meter(chosen, device, dtype)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if is_accelerator(device):
        memory = device_module(device).get_device_properties(device).total_memory
    link, latency = links or (
        reference.link_bandwidth if reference is not None else _UNKNOWN_LINK,
        _UNKNOWN_LATENCY,
    )
    machine = Machine(
        name=name,
        title=f"{name} (calibrated)",
        flops=meter.products(),
        memory_bandwidth=meter.copy(),
        memory=float(memory),
        link_bandwidth=link,
        nic_bandwidth=link if reference is None else reference.nic_bandwidth,
        ranks_per_node=_SHARED if device.type == "cpu" else max(1, accelerators().device_count()),
        host_bandwidth=meter.to_host(),
        sources=(f"measured by hfscale calibrate on {device.type}, {time.strftime('%Y-%m-%d')}",),
    )
    constants = _constants(meter, machine, latency, device.type == "cpu")
    document = {key: value for key, value in asdict(machine).items() if value is not None}
    return {**document, "time": asdict(constants)}


def _constants(meter: "_Meter", machine: Machine, latency: float, one_processor: bool) -> Constants:
    sizes = meter.sizes
    bandwidth = machine.memory_bandwidth
    host = meter.layer(_TINY, 1)
    share = meter.attention() / machine.flops
    given = replace(
        fitted(), products=1.0, memory=1.0, attention=share, elementwise=1.0, layer_host=host
    )
    job = Job(
        ParallelConfig(),
        sizes.sequence,
        sizes.batch,
        1,
        value_bytes=meter.dtype.itemsize,
    )
    known = layer_seconds(sizes.shape, job, machine, given)
    whole = meter.layer(sizes.sequence, sizes.batch) - (host if one_processor else 0.0)
    rest = max(0.1 * known.elementwise, whole - known.products - known.attention)
    constants = replace(
        given,
        elementwise=rest / known.elementwise,
        loss_bytes=max(1.0, meter.loss(machine.flops) * bandwidth),
        update_bytes=max(1.0, meter.update() * bandwidth),
        ends_host=host,
    )
    if not one_processor:
        return constants
    alone = {"sharpness": 1.0, "hidden": 0.0, "hidden_shards": 0.0, "step": 0.0, "far_latency": 0.0}
    shared = {"link": 1.0, "far_nic": 1.0, "data_link": 1.0, "nic": 1.0}
    return replace(
        constants, **alone, **shared, hop=2 * latency, latency=latency, latency_shards=2 * latency
    )


class _Meter:
    """Time operations on a device. Rates are FLOPs or bytes per second; layers are timed forward and backward."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes = sizes
        self.device = device
        self.dtype = dtype

    def products(self) -> float:
        """Return the measured FLOPs per second of a layer's matrix products."""
        tokens = self.sizes.sequence * self.sizes.batch
        h = self.sizes.hidden
        f = self.sizes.ffn
        seconds = 0.0
        operations = 0
        for rows, inner, columns in (
            (tokens, h, h),
            (tokens, h, f),
            (tokens, f, h),
            (h, tokens, f),
        ):
            left = self._random(rows, inner)
            right = self._random(inner, columns)
            seconds += self._time(partial(torch.matmul, left, right), 4)
            operations += 2 * rows * inner * columns
        return operations / seconds

    def attention(self) -> float:
        """Return the measured FLOPs per second of causal attention."""
        s = self.sizes
        shape = (s.batch, s.heads, s.sequence, s.hidden // s.heads)
        q, k, v = (self._random(*shape).requires_grad_() for _ in range(3))
        gradient = self._random(*shape)

        def both() -> None:
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

        return 7 * s.batch * s.sequence**2 * s.hidden / self._time(both)

    def copy(self) -> float:
        """Return the bandwidth of a copy on the device: bytes read plus bytes written per second."""
        source = self._random((1 << 26) if is_accelerator(self.device) else (1 << 23))
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._time(lambda: target.copy_(source))

    def to_host(self) -> float:
        """Return the bytes per second of copies from the device to the CPU's memory."""
        source = self._random(1 << 23)
        target = torch.empty(
            source.shape, dtype=source.dtype, pin_memory=is_accelerator(self.device)
        )
        return source.nbytes / self._time(lambda: target.copy_(source))

    def layer(self, sequence: int, batch: int) -> float:
        """Return the seconds of a stock LLaMA layer, forward and backward: half the difference between three layers and
        one layer.
        """
        return max(
            1e-6,
            (self._layers(3, sequence, batch) - self._layers(1, sequence, batch)) / 2,
        )

    def loss(self, flops: float) -> float:
        """Return the seconds per logit of head and cross entropy, minus the head's matrix product."""
        s = self.sizes
        tokens = s.sequence * s.batch
        hidden, weight = (
            self._random(tokens, s.hidden).requires_grad_(),
            self._random(s.vocabulary, s.hidden),
        )
        weight.requires_grad_()
        labels = torch.randint(s.vocabulary, (tokens,), device=self.device)

        def both() -> None:
            functional.cross_entropy((hidden @ weight.t()).float(), labels).backward()

        products = 6 * tokens * s.vocabulary * s.hidden / flops
        return max(0.0, self._time(both) - products) / (tokens * s.vocabulary)

    def update(self) -> float:
        """Return the seconds per weight of a step of fused AdamW."""
        weight = self._random(1 << 22).float().requires_grad_()
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        return self._time(lambda: optimizer.step()) / weight.numel()

    def _layers(self, count: int, sequence: int, batch: int) -> float:
        s = self.sizes
        sizes: dict[str, Any] = {
            "hidden_size": s.hidden,
            "intermediate_size": s.ffn,
            "num_hidden_layers": count,
        }
        sizes |= {"num_attention_heads": s.heads, "num_key_value_heads": s.heads, "vocab_size": 64}
        config = LlamaConfig(**sizes, use_cache=False)
        model: Any = LlamaModel(config)
        model.to(device=self.device, dtype=self.dtype).train()
        ids = torch.randint(64, (batch, sequence), device=self.device)
        gradient = self._random(batch, sequence, s.hidden)

        def both() -> None:
            model(input_ids=ids).last_hidden_state.backward(gradient)

        return self._time(both)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def _time(self, call: Callable[[], object], parts: int = 1) -> float:
        """Return the median seconds of ``call``, repeated for ``Sizes.seconds / parts`` seconds. On a CPU with one
        thread, processor time is counted.
        """
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.thread_time if alone else default_timer  # this timer waits for the accelerator
        timer = Timer(
            "call()", timer=clock, globals={"call": call}, num_threads=torch.get_num_threads()
        )
        return float(timer.blocked_autorange(min_run_time=self.sizes.seconds / parts).median)
