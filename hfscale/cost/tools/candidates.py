"""Every layout that a number of GPUs and a global batch leave open, as plain numbers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..model.machine import Machine
from .model_summary import ModelSummary

SCHEDULES = (("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2))
"""Schedules that are tried, with stages per rank; the first of them alone where there is one stage."""
_LONG = 16384  # tokens of a sequence from which on it is worth cutting
_NODES_OF_TENSOR_RANKS = 2
_OFFLOADS = (("optimizer",), ("optimizer", "activations"), ("parameters",), ("parameters", "activations"))


@dataclass(frozen=True)
class Candidate:
    """A layout with its microbatches.

    Attributes:
        tp: tensor ranks, with sequence parallelism.
        pp: pipeline ranks.
        cp: context ranks.
        ep: expert ranks.
        shard: data ranks that share weights, gradients and optimizer state.
        replicate: replicas of those.
        batch: sequences of a microbatch.
        microbatches: of a batch rank in a step.
        schedule: of the pipeline.
        virtual: stages of one pipeline rank.
        recompute: whether layers are computed again.
        offload: what lies on the host: ``optimizer``, ``activations``, ``parameters``.
    """

    tp: int
    pp: int
    cp: int
    ep: int
    shard: int
    replicate: int
    batch: int
    microbatches: int
    schedule: str
    virtual: int
    recompute: bool
    offload: tuple[str, ...] = ()

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
        """Its sizes, as in ``tp2 x pp4 x dp_shard8, 16 microbatches of 1, 1f1b``."""
        sizes = [("tp", self.tp), ("cp", self.cp), ("ep", self.ep), ("dp_shard", self.shard)]
        sizes += [("dp_replicate", self.replicate), ("pp", self.pp)]
        named = " x ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one process"
        extra = f", {self.schedule}" if self.pp > 1 else ""
        again = ", layers recomputed" if self.recompute else ""
        host = f", {' and '.join(self.offload)} on the host" if self.offload else ""
        return f"{named}, {self.microbatches} x {self.batch} sequences{extra}{again}{host}"


def candidates(facts: ModelSummary, machine: Machine, gpus: int, sequences: int, sequence: int) -> Iterator[Candidate]:
    """All of them.

    Args:
        gpus: ranks of the run.
        sequences: of a step, over all ranks.
        sequence: tokens of one.
    """
    for tp in _tensor_sizes(facts, machine, gpus):
        for pp in _divisors(gpus // tp):
            if pp > facts.shape.layers:
                continue
            for cp in _context_sizes(gpus // tp // pp, sequence):
                dp = gpus // tp // pp // cp
                if sequences % dp == 0:
                    yield from _of_sizes(facts, machine, (tp, pp, cp, dp), sequences // dp)


def offloading(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """The same with the host's memory, for where nothing fits without; of schedules, 1F1B alone."""
    for each in found:
        for what in _OFFLOADS if each.schedule == SCHEDULES[0][0] else ():
            if "parameters" not in what or each.shard * each.cp > 1:
                yield replace(each, offload=what)


def _of_sizes(
    facts: ModelSummary, machine: Machine, sizes: tuple[int, int, int, int], sequences: int
) -> Iterator[Candidate]:
    tp, pp, cp, dp = sizes
    local = max(1, machine.ranks_per_node // (tp * cp))
    shards = sorted({1, dp} | ({local} if dp % local == 0 else set()))
    for batch in (size for size in _divisors(sequences) if size & (size - 1) == 0 and size <= 64):
        count = sequences // batch
        if pp > 1 and count < pp:
            continue
        for schedule, virtual in SCHEDULES if pp > 1 else SCHEDULES[:1]:
            if not _runs(schedule, virtual, pp, count, facts.shape.layers):
                continue
            for ep in _expert_sizes(facts, tp, dp):
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


def _tensor_sizes(facts: ModelSummary, machine: Machine, gpus: int) -> list[int]:
    most = _NODES_OF_TENSOR_RANKS * machine.ranks_per_node
    return [size for size in _divisors(gpus) if size <= most and facts.heads % size == 0]


def _context_sizes(ranks: int, sequence: int) -> list[int]:
    return [1] if sequence < _LONG else [size for size in _divisors(ranks) if size <= sequence // (_LONG // 4)]


def _expert_sizes(facts: ModelSummary, tp: int, dp: int) -> list[int]:
    experts = facts.shape.experts
    if not experts:
        return [1]
    return [1, *(size for size in _divisors(tp * dp) if size > 1 and experts % size == 0 and size % tp == 0)]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
