"""One MoE block alone, forward and backward, by implementation of its experts: the part of experts.py for one GPU."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hfscale.parallel.experts.dispatch import plan_routes
from hfscale.parallel.experts.mixture import through_experts


@dataclass(frozen=True)
class BlockSize:
    """One block and its tokens."""

    hidden: int
    experts: int
    width: int
    top: int
    tokens: int

    @property
    def flops(self) -> int:
        """Of the experts' products, forward and backward: three matrices, two operations, three passes."""
        return 3 * 2 * 3 * self.tokens * self.top * self.hidden * self.width


BLOCKS = (BlockSize(2048, 64, 1024, 8, 8192), BlockSize(2048, 8, 4096, 2, 8192))
WARM_UP = 3


def _of_transformers(name: str) -> Callable[[nn.Module], None]:
    def choose(block: Any) -> None:
        block.experts.config._experts_implementation = name

    return choose


def _of_hfscale(block: Any) -> None:
    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        routes, _ = plan_routes(index, block.experts.num_experts, None)
        return through_experts(block.experts, hidden, weights, routes)

    block.experts.forward = forward


# Name -> what prepares a block for it; it may also replace modules or forwards of the block it is given.
IMPLEMENTATIONS: dict[str, Callable[[nn.Module], None]] = {
    "eager": _of_transformers("eager"),
    "grouped_mm": _of_transformers("grouped_mm"),
    "batched_mm": _of_transformers("batched_mm"),
    "hfscale": _of_hfscale,
}


def measure_blocks(
    rounds: int, device: str = "cuda", sizes: tuple[BlockSize, ...] = BLOCKS
) -> list[dict[str, Any]]:
    """Time all blocks; prints and returns a row for each."""
    rows = []
    for size in sizes:
        rows.append(_measure(size, rounds, torch.device(device)))
        print(json.dumps(rows[-1], indent=1), flush=True)
    return rows


def _measure(size: BlockSize, rounds: int, device: torch.device) -> dict[str, Any]:
    hidden = torch.randn(1, size.tokens, size.hidden, generator=torch.Generator().manual_seed(1))
    hidden = hidden.to(device, torch.bfloat16).requires_grad_()
    times: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    errors: dict[str, str] = {}
    compared: dict[str, float] = {}
    reference: list[Tensor] | None = None
    blocks: dict[str, Any] = {}
    for name, prepare in IMPLEMENTATIONS.items():
        blocks[name] = _block(size, device)
        prepare(blocks[name])
        try:
            peaks[name], found = _first(blocks[name], hidden)
        except torch.OutOfMemoryError:
            errors[name] = "out of memory"
            del blocks[name]
            continue
        reference = reference or found
        compared[name] = max(_relative(a, b) for a, b in zip(found, reference, strict=True))
        times[name] = []
    assert max(compared.values()) < 0.05, f"outputs or gradients differ: {compared}"
    for index in range(rounds + WARM_UP):
        for name, block in blocks.items():
            seconds = _seconds(block, hidden)
            if index >= WARM_UP:
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "block": asdict(size),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.machine(),
        "milliseconds": {name: round(1e3 * value, 3) for name, value in medians.items()},
        "TFLOP/s of the experts' products": {
            name: round(size.flops / value / 1e12, 1) for name, value in medians.items()
        },
        "GiB allocated at the peak, gradients included": peaks,
        "furthest from the first, relative": compared,
        "failed": errors,
    }


def _block(size: BlockSize, device: torch.device) -> Any:
    config = Qwen3MoeConfig(
        hidden_size=size.hidden,
        moe_intermediate_size=size.width,
        num_experts=size.experts,
        num_experts_per_tok=size.top,
        norm_topk_prob=True,
    )
    block: Any = Qwen3MoeSparseMoeBlock(config).to(device, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)
    return block


def _run(block: nn.Module, hidden: Tensor) -> Tensor:
    output: Tensor = block(hidden)
    output.backward(torch.ones_like(output))
    return output


def _first(block: nn.Module, hidden: Tensor) -> tuple[float, list[Tensor]]:
    """GiB that the first pass allocates beyond what there was; output and gradients."""
    before = 0
    if hidden.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        found = [_run(block, hidden).detach(), hidden.grad, *(p.grad for p in block.parameters())]
        kept = [tensor.clone() for tensor in found if tensor is not None]
    finally:
        hidden.grad = None
        block.zero_grad()
    peak = torch.cuda.max_memory_allocated() - before if hidden.is_cuda else 0
    return round(peak / 2**30, 3), kept


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference)


def _seconds(block: nn.Module, hidden: Tensor) -> float:
    block.zero_grad()
    hidden.grad = None
    if hidden.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    _run(block, hidden)
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
