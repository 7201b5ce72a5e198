"""From a plan and a batch to the step whose time is estimated."""

from dataclasses import replace
from math import prod

from ...plan import Plan
from ...plan.float8 import gathered_in_8_bits
from ...plan.offload import offloaded
from ...plan.recompute import recomputed
from .job import Job
from .machine import Machine
from .recompute import Situation, is_matrix, layers_held, trained_names, types_of

_UNPACKED = {4: 9.0, 8: 10.0}  # by bits: read, written in 16 bits and read again, in both passes
_PACKED = {4: 0.5 + 4 / 64, 8: 1.0}  # bytes of a weight by bits, with a scale for each block


def job_of(plan: Plan, machine: Machine, *, sequence: int, batch: int, microbatches: int, mixed: bool = False) -> Job:
    """What a step of this plan is.

    Args:
        sequence: tokens of a sequence.
        batch: sequences of one microbatch.
        microbatches: of one batch rank in a step.
        mixed: whether it computes in 16 bits over the weights' own type.
    """
    layout = plan.layout
    shards = layout.dp_shard
    return Job(
        sequence=sequence,
        batch=batch,
        microbatches=microbatches,
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.batch_world,
        cp=layout.cp,
        ep=layout.ep,
        expert_tp=layout.expert_tp,
        shards=shards,
        gathers=shards > 1 and (layout.pp == 1 or bool(layout.weights_regather)),
        virtual=int(layout.virtual_stages or 1),
        sequence_parallel=bool(plan.sequence_regions),
        exchanged=10 if layout.sequence_regather else 8,
        recompute=_recomputed_fraction(plan),
        attention_again=recomputed(plan).attention,
        trained=trained_fraction(plan),
        value_bytes=2 if mixed else types_of(plan, False).size,
        gradient_bytes=2 if layout.gradient_compression in ("bf16", "fp16") else gradient_bytes(plan),
        gathered_bytes=gathered_bytes(plan, mixed),
        unpacked=unpacked_bytes(plan),
        ranks_per_node=machine.ranks_per_node,
    )


def trained_fraction(plan: Plan) -> float:
    """Which fraction of the entries of matrices trains: the adapters', where there are any."""
    entries = {p.name: prod(p.shape) for p in plan.owned() if is_matrix(plan, p.name)}
    return sum(entries.get(name, 0) for name in trained_names(plan)) / max(1, sum(entries.values()))


def gradient_bytes(plan: Plan) -> int:
    """Bytes of a gradient as data ranks exchange it: of the widest of the model's types."""
    return max((p.dtype.itemsize for p in plan.owned() if p.dtype.is_floating_point), default=4)


def gathered_bytes(plan: Plan, mixed: bool) -> float:
    """Bytes of a weight of a matrix as data ranks gather it: as it is computed with, in 8 bits, or packed."""
    packed, size = frozenset[str](), 0.0
    if plan.quantized is not None:
        packed, size = frozenset(plan.quantized.weights), _PACKED[plan.quantized.bits]
    entries = {p.name: prod(p.shape) for p in plan.owned() if is_matrix(plan, p.name)}
    types = {p.name: 2 if mixed else p.dtype.itemsize for p in plan.owned()}
    types |= dict.fromkeys(gathered_in_8_bits(plan), 1)
    found = sum(count * (size if name in packed else types[name]) for name, count in entries.items())
    return found / max(1, sum(entries.values()))


def unpacked_bytes(plan: Plan) -> float:
    """Bytes moved for every weight of a quantized base, to compute with it in both passes."""
    return 0.0 if plan.quantized is None else _UNPACKED[plan.quantized.bits]


def with_host(plan: Plan, job: Job) -> Job:
    """The job with what goes between device and host, of the pipeline rank where that is most."""
    on_host = offloaded(plan)
    ranks = range(job.pp)
    found = replace(job, steps_on_host=on_host.optimizer or on_host.parameters)
    if on_host.activations is not None:
        found = replace(found, offloaded=max(_activations(plan, rank, job) for rank in ranks))
    if not found.steps_on_host:
        return found
    entries = max(
        sum(prod(plan.by_name[name].local_shape({"pp": rank})) for name in plan.local_names(rank)) for rank in ranks
    )
    if on_host.parameters:
        return replace(found, offloaded=found.offloaded + shard_traffic(job) * entries)
    return replace(found, handed=(job.gradient_bytes + job.gathered_bytes) * job.trained * entries)


def shard_traffic(job: Job) -> float:
    """Bytes between device and host of each weight of a shard that lies there: to be gathered, and its gradient."""
    return job.gradient_bytes * ((2 * job.microbatches if job.gathers else 1) + job.trained)


def _activations(plan: Plan, rank: int, job: Job) -> float:
    """Bytes of what a pipeline rank's layers keep, to the host and back, in a step."""
    names = frozenset(p.name for p in plan.owned())
    held = layers_held(plan, {"pp": rank}, Situation(round(job.tokens), trained=names))
    again = recomputed(plan).layers
    kept = sum(each.bytes.stream if each.name in again else each.bytes.kept for each in held)
    return 2 * kept * job.tokens * job.microbatches


def _recomputed_fraction(plan: Plan) -> float:
    again = recomputed(plan)
    if again.modules:
        return 0.5
    return len(again.layers) / max(1, len(plan.layers)) if again.budget is None else 0.5
