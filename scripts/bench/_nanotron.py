"""What a run of nanotron takes and holds, in the sweep of the Ultra-Scale Playbook: what is its own, and not hfscale's.

Its stages are cut greedily, its layers are slow with tensor ranks in pipelines over several nodes, it adds gradients up
in 32 bits beside weights of 16, and the gathered inputs of sequence parallelism stay alive where the host is ahead of
the device. Seconds otherwise come from :mod:`hfscale.cost.model.step_time`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from hfscale import ParallelConfig
from hfscale.cost.model.job import Job
from hfscale.cost.model.machines_known import Constants, Machine
from hfscale.cost.model.model_shape import ModelShape
from hfscale.cost.model.step_time import Seconds, StepTime, head_seconds, layer_seconds, step_time

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
_STALLS = 32  # nodes: of the runs on more, nine of ten stalled
_MARGIN = 1.05  # runs are measured so far below and above the likely memory in the median
_LEAST = 0.82  # of the memory: runs that want more than there is fail if this much cannot be freed
_ROOM = 0.75  # of the memory: held in the median by runs that wanted more than the budget


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

    @cached_property
    def job(self) -> Job:
        """Its step."""
        sizes = {"tp_size": self.tp, "pp_size": self.pp, "dp_shard_size": 1, "dp_replicate_size": 1}
        layout = ParallelConfig(
            **{**sizes, "dp_shard_size" if self.zero else "dp_replicate_size": self.dp}
        )
        return Job(
            layout, SEQUENCE, self.mbs, self.gradacc, sequence_parallel=self.tp > 1, exchanged=10
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
    return tuple(
        Stage(has.count("layer"), "embedding" in has, "head" in has, not has) for has in held
    )


def time_of(row: Row, machine: Machine, constants: Constants, slow: dict[str, float]) -> StepTime:
    """Seconds of a step, by term."""
    shape = shape_of(row.model)
    job = row.job
    stages = stages_of(shape, row.pp)
    layer, head = _parts(row, machine, constants, slow)
    seconds = [layer * stage.layers + (head if stage.head else Seconds()) for stage in stages]
    return step_time(
        seconds, [stage.weights(shape) / row.tp for stage in stages], job, machine, constants
    )


def _parts(
    row: Row, machine: Machine, constants: Constants, slow: dict[str, float]
) -> tuple[Seconds, Seconds]:
    shape = shape_of(row.model)
    job = row.job
    layer = layer_seconds(shape, job, machine, constants)
    if row.slow:
        tp = min(row.tp, 32)
        deeper = (row.pp / 2) ** slow["depth"] if tp == 32 else 1.0
        layer += Seconds(host=max(slow[str(tp)] * deeper - layer.host, 0.0))
    return layer, head_seconds(shape, job, machine, constants)


@dataclass(frozen=True)
class Held:
    """GiB of the first rank, which is the one that was measured.

    Attributes:
        wanted: with all gathered inputs that are alive where there is memory enough.
        least: with none of them.
    """

    wanted: float
    least: float

    def likely(self, machine: Machine) -> float:
        """What is measured: where memory is short, the allocator waits for the device and frees what it can at once."""
        if self.wanted * GIB <= machine.budget:
            return self.wanted
        return min(self.wanted, max(self.least, _ROOM * machine.memory / GIB))


def memory_of(
    row: Row,
    machine: Machine,
    constants: Constants,
    slow: dict[str, float],
    memory: dict[str, float],
) -> Held:
    """GiB of the first rank.

    ::

        states       8 bytes for every weight, and 12 more that ZeRO-1 shares out
        activations  (16 h + 8 f) / tp bytes for every token and layer, of the microbatches in flight
        gathered     2 h bytes for every token and gathered input of a layer that is still alive, and some around them
        logits       where there is one stage, and those of the microbatch before
    """
    shape = shape_of(row.model)
    stage = stages_of(shape_of(row.model), row.pp)[0]
    tokens = row.mbs * SEQUENCE
    weights = stage.weights(shape) / row.tp
    states = weights * (_WEIGHT + _STATES / (row.dp if row.zero else 1))
    flying = stage.layers * min(row.pp, row.gradacc) * tokens
    kept = flying * memory["kept"] * (16 * shape.hidden + 8 * shape.ffn) / row.tp
    buffers = 4 * tokens * 2 * shape.hidden
    each = memory["logits"] + memory["again"] * (row.gradacc > 1)
    logits = each * tokens * VOCABULARY / row.tp if stage.head else 0.0
    least = memory["fixed"] + (states + kept + buffers + logits) / GIB
    alive = _alive(row, machine, constants, slow, memory) if row.tp > 1 else 0.0
    gathered = (memory["gathered"] * flying + memory["wide"] * tokens) * 2 * shape.hidden
    return Held(least + alive * gathered / GIB, least)


def _alive(
    row: Row,
    machine: Machine,
    constants: Constants,
    slow: dict[str, float],
    memory: dict[str, float],
) -> float:
    """Which fraction of the gathered inputs is alive until their microbatch's backward pass.

    All of them where the host is ahead of the device, but for a step's only microbatch. In pipelines over nodes layers
    are slow and the device waits for the host, so the first two microbatches in flight free theirs; the next ones wait
    behind what is handed to the next stage, and the host is ahead again. So it is once the pipeline is full, if layers
    keep the device busy. Where exchanges stall nothing stays: tensor ranks of four nodes, or runs on 64.
    """
    stalls = row.pp > 1 if row.tp >= 32 else row.nodes > _STALLS
    if stalls:
        return 0.0
    flying = min(row.pp, row.gradacc)
    if row.gradacc == row.pp == 1:
        return memory["first"]
    if not row.slow or flying == 1:
        return 1.0
    layer, _ = _parts(row, machine, constants, slow)
    busy = (layer.device / layer.host - memory["idle"]) / (memory["busy"] - memory["idle"])
    behind = 1 - 2 / flying
    return behind + (1 - behind) * min(max(busy, 0.0), 1.0) * (row.gradacc > row.pp)


def refusal(row: Row) -> str:
    """Why nanotron does not start such a run, whatever its memory; nothing where it does."""
    if row.gradacc < row.pp - 1:
        return f"{row.gradacc} microbatches for {row.pp} stages"
    if row.dp > 1 and any(stage.empty for stage in stages_of(shape_of(row.model), row.pp)):
        return f"{row.pp} stages for {shape_of(row.model).layers} layers: some are empty"
    return ""


def verdict(row: Row, held: Held, machine: Machine) -> str:
    """``fits``, ``tight`` (slowed down by an allocator that is short of memory) or ``does not fit``."""
    short = (
        held.wanted * GIB > _MARGIN * machine.memory and held.least * GIB > _LEAST * machine.memory
    )
    if refusal(row) or short:
        return "does not fit"
    return "tight" if held.wanted * GIB > machine.budget else "fits"


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
