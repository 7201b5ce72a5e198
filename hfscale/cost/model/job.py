"""Describe a training step by the numbers that its time depends on: axis sizes, batch, recomputation, and the layers
and weights of each pipeline rank.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod

from ..._compat.peft import LORA_A
from ...config.parallel import ParallelConfig
from ...plan import Plan
from ...plan.context_plan import NO_EXCHANGE, Exchange, exchange_of
from ...plan.feature_plans import (
    gathered_in_8_bits,
    offloaded,
    recomputed,
    weights_in_8_bits,
)
from .activation_bytes import has_head, is_matrix, trained_names
from .layer_bytes import types_of, widest

_DECODED = {4: 9.0, 8: 10.0}  # bits -> bytes moved per weight to dequantize it, in both passes


@dataclass(frozen=True)
class Job:
    """Describe one training step by everything except the model's shape that its time depends on: layout, batch,
    recomputation, precision, offload.
    """

    layout: ParallelConfig
    sequence: int  # tokens per sequence
    batch: int  # sequences per microbatch
    microbatches: int  # microbatches of one batch rank in a step
    # Whether weights are gathered for every microbatch, in both passes (ZeRO-3).
    gathers: bool = False
    sequence_parallel: bool = False  # whether norms and residuals are sharded over tp
    # Values that a layer's collectives send and receive per value of hidden states, over all passes: 8 for two gathers
    # and two scatters in each direction, 10 if the backward pass gathers inputs again.
    exchanged: float = 8
    recompute: float = 0.0  # fraction of layers that are recomputed
    # Whether everything except products and attention is recomputed in all layers.
    elementwise: bool = False
    # Whether attention between its projections is recomputed in all layers.
    attention_again: bool = False
    tile: int = 0  # tokens per tile in which norms and MLPs run, and are recomputed; 0: no tiles
    eight: float = 0.0  # fraction of layer weights whose products run in 8 bits
    exchange: Exchange = NO_EXCHANGE  # how context-parallel ranks exchange keys and values
    causal: bool = True  # whether attention is causal
    adapted: float = 0.0  # values per token and layer that adapter products read and write
    # Fraction of the weights that train; frozen weights have no gradients.
    trained: float = 1.0
    value_bytes: float = 2  # bytes per value of hidden states
    gradient_bytes: float = 4  # bytes per gradient in collectives
    gathered_bytes: float = 2  # bytes per weight in all-gathers of data-parallel ranks
    decoded: float = 0.0  # bytes moved per quantized weight to dequantize it in both passes
    # Bytes to and from CPU memory in addition to a step's passes: activations, or shards.
    offloaded: float = 0.0
    steps_on_host: bool = False  # whether the optimizer steps in CPU memory

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank; of context-parallel ranks, on the rank with most tokens."""
        return self.layout.own_tokens(self.sequence * self.batch)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.sequence * self.batch * self.microbatches * self.layout.batch_world

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which the expert weights of one layer are divided: by expert, and within experts."""
        return self.layout.ep * self.layout.expert_tp if self.layout.ep > 1 else self.layout.tp

    @property
    def virtual(self) -> int:
        """Number of pipeline stages per pipeline rank."""
        return self.layout.virtual_stages or 1

    def shard_of(self, weights: float, experts: float) -> float:
        """Return the number of entries that one data-parallel rank holds of ``weights`` entries of ordinary weights and
        ``experts`` entries of experts.
        """
        return weights / self.layout.dp_shard + experts / self.layout.size("edp_shard")

    def with_host(self, what: Collection[str], activations: float, entries: float) -> "Job":
        """Return this job with the kinds in ``what`` (``"parameters"``, ``"optimizer"``, ``"activations"``) offloaded
        to CPU memory. ``activations`` is the number of bytes of activations moved per step, ``entries`` the number of
        weights in a rank's shard.
        """
        shards = self.gradient_bytes * (
            (2 * self.microbatches if self.gathers else 1) + self.trained
        )
        moved = activations * ("activations" in what) + shards * entries * ("parameters" in what)
        return replace(
            self, offloaded=moved, steps_on_host="optimizer" in what or "parameters" in what
        )


@dataclass(frozen=True)
class Place:
    """Describe what one pipeline rank holds of the model: the number of layers, and the entries of its weights before
    they are sharded over data ranks.
    """

    layers: int
    embedding: bool
    head: bool
    layer_weights: float  # entries of layers, without experts
    expert_weights: float  # entries of experts, summed over the data-parallel ranks that shard them
    table_weights: float  # entries of embedding and head, outside layers
    forward: int = 0  # number of stages that send their output to another rank
    backward: int = 0  # number of stages that send gradients to another rank
    trained: float = 1.0  # fraction of these entries that trains
    # Bytes of gradients on this rank that are all-reduced over tensor-parallel ranks, once per step.
    partial: float = 0.0

    @property
    def ends(self) -> int:
        """How many of the token embedding and the head this rank holds: 0, 1 or 2."""
        return self.embedding + self.head

    @property
    def weights(self) -> float:
        """Number of entries of all weights on this pipeline rank except experts."""
        return self.layer_weights + self.table_weights


def job_of(
    plan: Plan,
    *,
    sequence: int,
    batch: int,
    microbatches: int,
    mixed: str = "no",
) -> Job:
    """Describe a step of the plan's model, with ``mixed`` precision, for estimates of its time."""
    layout = plan.layout
    again = recomputed(plan)
    count = max(1, len(plan.layers))
    in_layers = tuple(f"{layer}." for layer in plan.layers)
    fraction = len(again.layers) / count if again.budget is None else 0.5
    entries = matrix_entries(plan)
    inside = {name: size for name, size in entries.items() if name.startswith(in_layers)}
    trains = sum(entries.get(name, 0) for name in trained_names(plan)) / max(
        1, sum(entries.values())
    )
    return Job(
        layout,
        sequence,
        batch,
        microbatches,
        gathers=layout.dp_shard > 1 and (layout.pp == 1 or bool(layout.weights_regather)),
        sequence_parallel=bool(plan.sequence_regions),
        exchanged=10 if layout.sequence_regather else 8,
        recompute=0.5 if again.modules and not again.tile else fraction,
        elementwise=again.elementwise,
        attention_again=again.attention,
        tile=again.tile,
        eight=sum(inside[name] for name in weights_in_8_bits(plan) & inside.keys())
        / max(1, sum(inside.values())),
        exchange=exchange_of(plan),
        adapted=sum(
            sum(plan.by_name[a.base].shape[-2:]) for a in plan.adapters if a.kept_in == LORA_A
        )
        / count,
        trained=trains,
        value_bytes=types_of(plan).size if mixed == "no" else 2,
        gradient_bytes=2 if layout.gradient_compression in ("bf16", "fp16") else widest(plan),
        gathered_bytes=_gathered_bytes(plan, mixed != "no"),
        decoded=0.0 if plan.quantized is None else _DECODED[plan.quantized.bits],
    )


def matrix_entries(plan: Plan) -> dict[str, int]:
    """Return the number of entries of each parameter with two or more dims, by name."""
    return {p.name: prod(p.shape) for p in plan.owned() if is_matrix(plan, p.name)}


def _gathered_bytes(plan: Plan, mixed: bool) -> float:
    """Return the mean number of bytes per weight that data-parallel ranks all-gather. A weight is gathered in the dtype
    of the computation, in 8 bits, or quantized.
    """
    quantized = frozenset(plan.quantized_weights)
    size = 0.0 if plan.quantized is None else plan.quantized.bytes_per_value
    types = {p.name: 2 if mixed else p.dtype.itemsize for p in plan.owned()}
    types |= dict.fromkeys(gathered_in_8_bits(plan), 1)
    entries = matrix_entries(plan)
    total = sum(
        count * (size if name in quantized else types[name]) for name, count in entries.items()
    )
    return total / max(1, sum(entries.values()))


def with_host_of(plan: Plan, job: Job, offloaded_bytes: int) -> Job:
    """Return ``job`` with the bytes that offloading moves between device and CPU memory in a step, on the pipeline rank
    that moves most; ``offloaded_bytes`` are those of one microbatch's activations.
    """
    on_host = offloaded(plan)
    ranks = range(plan.layout.pp)
    what = (
        {"parameters"} if on_host.parameters else {"optimizer"} if on_host.optimizer else set[str]()
    )
    what |= set() if on_host.activations is None else {"activations"}
    activations = 2 * offloaded_bytes * job.microbatches
    local = [
        [plan.by_name[name].local_shape({}) for name in plan.local_names(rank)] for rank in ranks
    ]
    return (
        job.with_host(what, activations, max(sum(map(prod, shapes)) for shapes in local))
        if what
        else job
    )


def places_of(plan: Plan) -> list[Place]:
    """Describe, for each pipeline rank, its layers and the entries of its weights."""
    return [_place(plan, rank) for rank in range(plan.layout.pp)]


def _place(plan: Plan, rank: int) -> Place:
    home = (0,) if plan.stages is None else plan.stages.ranks
    own = [stage for stage, where in enumerate(home) if where == rank]
    here = {name: prod(plan.by_name[name].model_shape({})) for name in plan.local_names(rank)}
    mixtures = tuple(f"{mixture.name}." for mixture in plan.mixtures)
    layers = tuple(f"{layer}." for layer in plan.layers)
    spread, in_layers = (
        sum(here[n] for n in here if n.startswith(parts)) for parts in (mixtures, layers)
    )
    trained = {name: here[name] for name in trained_names(plan) & here.keys()}
    summed = [plan.by_name[name] for name in trained if "tp" in plan.by_name[name].partial]
    return Place(
        layers=sum(plan.is_local(rank, layer) for layer in plan.layers),
        embedding=0 in own,
        head=has_head(plan, rank),
        layer_weights=in_layers - spread,
        expert_weights=spread,
        table_weights=sum(here.values()) - in_layers,
        forward=sum(stage + 1 < len(home) and home[stage + 1] != rank for stage in own),
        backward=sum(stage > 0 and home[stage - 1] != rank for stage in own),
        trained=sum(trained.values()) / max(1, sum(here.values())),
        partial=sum(here[p.name] * p.dtype.itemsize for p in summed) / plan.layout.dp_shard,
    )
