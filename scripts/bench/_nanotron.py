"""What a run of nanotron takes and holds, in the sweep of the Ultra-Scale Playbook: what is its own, and not hfscale's.

Its stages are cut greedily, its layers are slow with tensor ranks in pipelines over several nodes, it adds gradients up
in 32 bits beside weights of 16, and the gathered inputs of sequence parallelism stay alive where the host is ahead of
the device. Seconds otherwise come from :mod:`hfscale.estimate.step_time`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from hfscale.estimate.constants import Constants
from hfscale.estimate.job import Job
from hfscale.estimate.layer_time import Seconds, head_seconds, layer_seconds
from hfscale.estimate.machine import Machine
from hfscale.estimate.model_shape import ModelShape
from hfscale.estimate.step_time import StepTime, step_time

SEQUENCE = 4096
VOCABULARY = 131072
GIB = 2**30
# Layers, hidden, ffn, tied: all with as many key heads as heads.
MODELS = {
    "1B": (16, 2048, 8192, True),
    "3B": (28, 3072, 8192, True),
    "8B": (32, 4096, 14336, False),
    "80B": (80, 8192, 28672, False),
}
_STATES = 12  # bytes of a weight: its copy in 32 bits and two moments, which ZeRO-1 shares out
_WEIGHT = 8  # bytes of a weight and its gradient in 16 bits, and of the gradient's sum in 32
_MARGIN = 1.05  # runs are measured so far below and above the likely memory in the median


def shape_of(model: str) -> ModelShape:
    """The shape of one of the sweep's models."""
    layers, hidden, ffn, tied = MODELS[model]
    return ModelShape(layers, hidden, hidden, hidden, ffn, VOCABULARY, tied=tied)


@dataclass(frozen=True)
class Row:
    """One run: a line of the table."""

    model: str
    nodes: int
    mbs: int
    gradacc: int
    dp: int
    pp: int
    tp: int
    zero: int

    @property
    def slow(self) -> bool:
        """Whether its layers are slow: tensor ranks in a pipeline over several nodes."""
        return self.tp > 1 and self.pp > 1 and self.nodes > 1

    @property
    def job(self) -> Job:
        """Its step."""
        return Job(
            sequence=SEQUENCE,
            batch=self.mbs,
            microbatches=self.gradacc,
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            shards=self.dp if self.zero else 1,
            sequence_parallel=self.tp > 1,
            exchanged=10,
        )


@dataclass(frozen=True)
class Stage:
    """What a pipeline rank has: layers, embedding, head; and whether it has anything at all."""

    layers: int
    embedding: bool
    head: bool
    empty: bool

    def weights(self, shape: ModelShape) -> int:
        """Entries of its matrices, over tensor ranks all together."""
        tables = 1 if self.embedding and self.head and shape.tied else self.embedding + self.head
        return self.layers * shape.layer_weights + tables * shape.table_weights


@cache
def stages_of(shape: ModelShape, pp: int) -> tuple[Stage, ...]:
    """The greedy cut: a stage takes blocks until their costs reach its share of all, one stage further a block.

    Blocks are embedding, layers, norm, head, cast and loss; layers and head cost what they have of weights.
    """
    kinds = ["embedding", *["layer"] * shape.layers, "norm", "head", "cast", "loss"]
    cost = {"layer": shape.layer_weights, "head": shape.table_weights}
    sums = list(accumulate(cost.get(kind, 0) for kind in kinds))
    held: list[list[str]] = [[] for _ in range(pp)]
    at = 0
    for kind, total in zip(kinds, sums, strict=True):
        held[at].append(kind)
        if at < pp - 1 and total >= sums[-1] * (at + 1) / pp:
            at += 1
    return tuple(Stage(has.count("layer"), "embedding" in has, "head" in has, not has) for has in held)


def time_of(row: Row, machine: Machine, constants: Constants, slow: dict[str, float]) -> StepTime:
    """Seconds of a step, by term."""
    shape, job = shape_of(row.model), row.job
    stages = stages_of(shape, row.pp)
    layer, head = _parts(row, machine, constants, slow)
    seconds = [layer * stage.layers + (head if stage.head else Seconds()) for stage in stages]
    return step_time(seconds, [stage.weights(shape) / row.tp for stage in stages], job, machine, constants)


def _parts(row: Row, machine: Machine, constants: Constants, slow: dict[str, float]) -> tuple[Seconds, Seconds]:
    shape, job = shape_of(row.model), row.job
    layer = layer_seconds(shape, job, machine, constants)
    if row.slow:
        tp = min(row.tp, 32)
        deeper = (row.pp / 2) ** slow["depth"] if tp == 32 else 1.0
        layer += Seconds(host=max(slow[str(tp)] * deeper - layer.host, 0.0))
    return layer, head_seconds(shape, job, machine, constants)


def memory_of(
    row: Row, machine: Machine, constants: Constants, slow: dict[str, float], memory: dict[str, float]
) -> float:
    """Likely GiB of the first rank, which is the one that was measured.

    ::

        states       8 bytes for every weight, and 12 more that ZeRO-1 shares out
        activations  (16 h + 8 f) / tp bytes for every token and layer, of the microbatches in flight
        gathered     2 h bytes for every token and gathered input of a layer that is still alive
        logits       where there is one stage
    """
    shape, stage = shape_of(row.model), stages_of(shape_of(row.model), row.pp)[0]
    tokens = row.mbs * SEQUENCE
    weights = stage.weights(shape) / row.tp
    states = weights * (_WEIGHT + _STATES / (row.dp if row.zero else 1))
    kept = memory["kept"] * (16 * shape.hidden + 8 * shape.ffn) / row.tp
    gathered = memory["gathered"] * _alive(row, machine, constants, slow, memory) * 2 * shape.hidden
    layers = stage.layers * min(row.pp, row.gradacc) * tokens * (kept + gathered * (row.tp > 1))
    buffers = 4 * tokens * 2 * shape.hidden
    logits = memory["logits"] * tokens * VOCABULARY / row.tp if stage.head else 0.0
    return memory["fixed"] + (states + layers + buffers + logits) / GIB


def _alive(row: Row, machine: Machine, constants: Constants, slow: dict[str, float], memory: dict[str, float]) -> float:
    """Which fraction of the gathered inputs is alive: all, but where slow layers give the device time to free them."""
    if not row.slow:
        return 1.0
    layer, _ = _parts(row, machine, constants, slow)
    far = (min(8, row.tp) / row.tp) ** 2
    found = far * (memory["ahead"] * layer.device / layer.host + memory["deep"] * (row.pp > 2))
    return min(found, 1.0)


def refusal(row: Row) -> str:
    """Why nanotron does not start such a run, whatever its memory; nothing where it does."""
    if row.gradacc < row.pp - 1:
        return f"{row.gradacc} microbatches for {row.pp} stages"
    if row.dp > 1 and any(stage.empty for stage in stages_of(shape_of(row.model), row.pp)):
        return f"{row.pp} stages for {shape_of(row.model).layers} layers: some are empty"
    return ""


def verdict(row: Row, likely: float, machine: Machine) -> str:
    """``fits``, ``tight`` (slowed down by an allocator that is short of memory) or ``does not fit``."""
    if refusal(row) or likely * GIB > _MARGIN * machine.memory:
        return "does not fit"
    return "tight" if likely * GIB > machine.budget else "fits"


def replicas_filter(rows: Sequence[Row], seconds: Sequence[float]) -> list[bool]:
    """Which runs are not stalled: no run with equal model, tp, pp and microbatch is so much faster.

    Such runs differ in data ranks and ZeRO only. One is stalled that takes over 35% more for a microbatch than the
    fastest of them, and more than gradients at 10 GB/s explain.
    """
    slots = [time / (row.gradacc + row.pp - 1) for row, time in zip(rows, seconds, strict=True)]
    best: dict[tuple[str, int, int, int], float] = {}
    for row, slot in zip(rows, slots, strict=True):
        key = (row.model, row.tp, row.pp, row.mbs)
        best[key] = min(slot, best.get(key, slot))
    kept = []
    for row, slot in zip(rows, slots, strict=True):
        fastest = best[row.model, row.tp, row.pp, row.mbs]
        shape = shape_of(row.model)
        weights = max(stage.weights(shape) for stage in stages_of(shape, row.pp)) / row.tp
        extra = (slot - fastest) * (row.gradacc + row.pp - 1)
        kept.append(slot <= 1.35 * fastest or extra <= 8 * weights * (row.dp > 1) / 10e9)
    return kept
