"""Time the collectives of training by message size, between ranks of this machine or in torch's process group.

The size of a message is the larger of the bytes that one rank passes to the collective (reduce-scatter, all-to-all,
scatter's root) and the bytes that it gets (all-gather, gather's root). The *bus bandwidth* is the minimum bandwidth of
each link, and does not depend on the number of ranks, so collectives and machines can be compared by it. With ``n``
ranks and ``S`` bytes in ``t`` seconds::

    all-reduce                                          S / t * 2 (n - 1) / n
    all-gather, reduce-scatter, all-to-all,
    gather, scatter                                     S / t * (n - 1) / n
    broadcast, reduce                                   S / t
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch_device import device_module, is_accelerator

Call = Callable[[], object]

_SECONDS = 0.2  # approximate time of measuring one collective with one size
_MOST = 200


@dataclass(frozen=True)
class Measured:
    """The time of one collective with one message size."""

    collective: str  # a name of :data:`COLLECTIVES`
    size: int  # bytes of the message
    ranks: int  # number of ranks that took part
    seconds: float  # time of one call, the median of its repetitions on the slowest rank

    @property
    def bus_bandwidth(self) -> float:
        """The minimum bytes per second that each link carries."""
        passes = {
            "all-reduce": 2 * (self.ranks - 1) / self.ranks,
            "broadcast": 1.0,
            "reduce": 1.0,
        }
        return (
            self.size
            / self.seconds
            * passes.get(
                self.collective,
                (self.ranks - 1) / self.ranks,
            )
        )


def _pieces(whole: Tensor) -> list[Tensor]:
    return list(whole.chunk(dist.get_world_size()))


def _at_root(whole: Tensor) -> list[Tensor] | None:
    return _pieces(whole) if dist.get_rank() == 0 else None


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Call]] = {
    "broadcast": lambda whole, part: partial(dist.broadcast, whole, src=0),
    "reduce": lambda whole, part: partial(dist.reduce, whole, dst=0),
    "all-reduce": lambda whole, part: partial(dist.all_reduce, whole),
    "gather": lambda whole, part: partial(dist.gather, part, _at_root(whole), dst=0),
    "all-gather": lambda whole, part: partial(dist.all_gather, _pieces(whole), part),
    "scatter": lambda whole, part: partial(dist.scatter, part, _at_root(whole), src=0),
    "reduce-scatter": lambda whole, part: partial(dist.reduce_scatter_single, part, whole),
    "all-to-all": lambda whole, part: partial(
        dist.all_to_all_single, torch.empty_like(whole), whole
    ),
}
"""Name -> a function that returns a call of the collective, given a full message and one rank's shard of it."""


def measure(
    device: torch.device, sizes: Sequence[int], seconds: float = _SECONDS
) -> list[Measured]:
    """Time each collective for each size (bytes, rounded up), for ``seconds`` each. Call it on every rank."""
    ranks = dist.get_world_size()
    measured = []
    for asked in sizes:
        count = -(-asked // (4 * ranks)) * ranks
        whole = torch.zeros(count, device=device)
        part = torch.zeros(count // ranks, device=device)
        for name, make in COLLECTIVES.items():
            taken = _median(make(whole, part), device, seconds)
            measured.append(Measured(name, 4 * count, ranks, taken))
    return measured


def _median(call: Call, device: torch.device, seconds: float) -> float:
    first = min(_timed(call, device) for _ in range(2))  # the very first call connects the ranks
    repeats = torch.tensor(
        [min(_MOST, max(3, int(seconds / max(first, 1e-6))))],
        device=device,
    )
    dist.broadcast(repeats, src=0)
    own = statistics.median(_timed(call, device) for _ in range(int(repeats)))
    slowest = torch.tensor([own], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _timed(call: Call, device: torch.device) -> float:
    _wait(device)
    dist.barrier()
    started = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if is_accelerator(device):
        device_module(device).synchronize(device)


def suggested_bucket(measured: Sequence[Measured]) -> int | None:
    """Return the smallest message, in bytes, with which all-reduce reaches 80% of its best bandwidth: a good size for
    DDP's ``bucket_cap_mb``. Return ``None`` without measurements.
    """
    all_reduces = [
        measurement for measurement in measured if measurement.collective == "all-reduce"
    ]
    best = max((measurement.bus_bandwidth for measurement in all_reduces), default=0.0)
    fast = [
        measurement.size for measurement in all_reduces if measurement.bus_bandwidth >= 0.8 * best
    ]
    return min(fast, default=None)


def draw(target: Path, measured: Sequence[Measured], title: str) -> None:
    """Draw bus bandwidth over message size, one line per collective, into the file ``target``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(measurement.collective for measurement in measured):
        own = [measurement for measurement in measured if measurement.collective == name]
        axes.plot(
            [measurement.size for measurement in own],
            [measurement.bus_bandwidth / 1e9 for measurement in own],
            marker="o",
            ms=3,
            label=name,
        )
    axes.set(
        title=title,
        xlabel="message (bytes)",
        ylabel="bus bandwidth (GB/s)",
        xscale="log",
        yscale="log",
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(target, dpi=150)
