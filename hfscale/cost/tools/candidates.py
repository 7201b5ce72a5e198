"""Every layout that a number of GPUs and a global batch leave open, as plain numbers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..model.machine import Machine
from .model_summary import ModelSummary

SCHEDULES = (("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2))
"""Schedules that are tried, with stages per rank; the first of them alone where there is one stage."""
_LONG = 16384  # tokens of a sequence from which on it is worth cutting
_NODES_OF_TENSOR_RANKS = 2
_OFFLOADS = (("optimizer",), ("optimizer", "activations"), ("parameters",), ("parameters", "activations"))


@dataclass(frozen=True)
class Candidate:
    """A layout with its microbatches."""

    tp: int  # with sequence parallelism
    pp: int
    cp: int
    ep: int
    shard: int  # data ranks that share weights, gradients and optimizer state
    replicate: int  # replicas of those
    batch: int  # sequences of a microbatch
    microbatches: int  # of a batch rank in a step
    schedule: str
    virtual: int  # stages of one pipeline rank
    recompute: bool  # whether layers are computed again
    offload: tuple[str, ...] = ()  # what lies on the host: ``optimizer``, ``activations``, ``parameters``

    @property
    def dp(self) -> int:
        """Ranks with distinct batches."""
        return self.shard * self.replicate

    @property
    def kind(self) -> str:
        """The axes that it uses, in words."""
        names = [("tensor", self.tp), ("pipeline", self.pp), ("context", self.cp), ("expert", self.ep)]
        used = [name for name, size in [*names, ("sharded data", self.shard)] if size > 1]
        return " x ".join(used) or "replicas" if self.dp * self.tp * self.pp * self.cp > 1 else "one process"

    def describe(self) -> str:
        """Return its sizes, as in ``tp2 x pp4 x dp_shard8, 16 microbatches of 1, 1f1b``."""
        sizes = [("tp", self.tp), ("cp", self.cp), ("ep", self.ep), ("dp_shard", self.shard)]
        sizes += [("dp_replicate", self.replicate), ("pp", self.pp)]
        named = " x ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one process"
        extra = f", {self.schedule}" if self.pp > 1 else ""
        again = ", layers recomputed" if self.recompute else ""
        host = f", {' and '.join(self.offload)} on the host" if self.offload else ""
        return f"{named}, {self.microbatches} x {self.batch} sequences{extra}{again}{host}"

    def parallel_arguments(self) -> dict[str, Any]:
        """Return the arguments of :class:`hfscale.ParallelConfig`."""
        sizes = {"tp_size": self.tp, "pp_size": self.pp, "cp_size": self.cp, "ep_size": self.ep}
        sizes |= {"dp_shard_size": self.shard, "dp_replicate_size": self.replicate}
        found: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
        if self.tp > 1:
            found["sequence_parallel"] = True
        if self.pp > 1:
            found |= {"pipeline_schedule": self.schedule, "num_microbatches": self.microbatches}
            found |= {"virtual_stages": self.virtual} if self.virtual > 1 else {}
        return found


def candidates(
    summary: ModelSummary, machine: Machine, gpus: int, sequences: int, sequence: int
) -> Iterator[Candidate]:
    """Yield every layout of ``gpus`` ranks for so many sequences a step, of ``sequence`` tokens each."""
    for tp in _tensor_sizes(summary, machine, gpus):
        for pp in _divisors(gpus // tp):
            if pp > summary.shape.layers:
                continue
            for cp in _context_sizes(gpus // tp // pp, sequence):
                dp = gpus // tp // pp // cp
                if sequences % dp == 0:
                    yield from _of_sizes(summary, machine, (tp, pp, cp, dp), sequences // dp)


def offloading(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the same with the host's memory, for where nothing fits without; of schedules, 1F1B alone."""
    for each in found:
        for what in _OFFLOADS if each.schedule == SCHEDULES[0][0] else ():
            if "parameters" not in what or each.shard * each.cp > 1:
                yield replace(each, offload=what)


def _of_sizes(
    summary: ModelSummary, machine: Machine, sizes: tuple[int, int, int, int], sequences: int
) -> Iterator[Candidate]:
    tp, pp, cp, dp = sizes
    local = max(1, machine.ranks_per_node // (tp * cp))
    shards = sorted({1, dp} | ({local} if dp % local == 0 else set()))
    for batch in (size for size in _divisors(sequences) if size & (size - 1) == 0 and size <= 64):
        count = sequences // batch
        if pp > 1 and count < pp:
            continue
        for schedule, virtual in SCHEDULES if pp > 1 else SCHEDULES[:1]:
            if not _runs(schedule, virtual, pp, count, summary.shape.layers):
                continue
            for ep in _expert_sizes(summary, tp, dp):
                for shard in shards:
                    if ep // tp > 1 and shard % (ep // tp):
                        continue
                    for again in (False, True) if schedule != "zbv" else (False,):  # split passes recompute twice
                        yield Candidate(tp, pp, cp, ep, shard, dp // shard, batch, count, schedule, virtual, again)


def _runs(schedule: str, virtual: int, pp: int, microbatches: int, layers: int) -> bool:
    if pp * virtual > layers:
        return False
    if schedule == "interleaved1f1b":
        return microbatches % pp == 0
    return schedule != "zbv" or microbatches >= 2 * pp


def _tensor_sizes(summary: ModelSummary, machine: Machine, gpus: int) -> list[int]:
    most = _NODES_OF_TENSOR_RANKS * machine.ranks_per_node
    return [size for size in _divisors(gpus) if size <= most and summary.heads % size == 0]


def _context_sizes(ranks: int, sequence: int) -> list[int]:
    return [1] if sequence < _LONG else [size for size in _divisors(ranks) if size <= sequence // (_LONG // 4)]


def _expert_sizes(summary: ModelSummary, tp: int, dp: int) -> list[int]:
    experts = summary.shape.experts
    if not experts:
        return [1]
    return [1, *(size for size in _divisors(tp * dp) if size > 1 and experts % size == 0 and size % tp == 0)]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
