"""Hold, for each feature of a layout, what is planned: one frozen class for each feature.

How parameters are sharded and their gradients reduced is planned elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..models.names import wild_name
from .contents import Feature, PlanContents

ROUTES = "routes"
"""An argument of a forward pass that a hook removes before the model: each token's experts, ``[b, s, layers, k]``."""


@dataclass(frozen=True)
class RecomputePlan(Feature):
    """Plan the recomputation of modules in the backward pass. Names are full module names."""

    layers: tuple[
        str, ...
    ] = ()  # recomputed layers, which keep only their input; with a budget, the candidates
    modules: tuple[str, ...] = ()  # modules inside layers that are recomputed one by one
    attention: bool = False  # whether attention is recomputed between its query, key, value and output projections
    # whether every layer recomputes everything except matrix products, attention and communication
    elementwise: bool = False
    tile: int = 0  # tokens of a tile in which ``modules`` are computed; 0: all tokens at once
    keep: tuple[
        str, ...
    ] = ()  # operators in ``layers`` whose results are kept (selective checkpointing)
    # bytes of activations that the layers of a rank may keep; ``None``: all ``layers`` are recomputed
    budget: int | None = None
    # tokens of the microbatch for which the budget holds; ``None``: the largest microbatch of the first step counts
    tokens: int | None = None

    def describe(self, plan: PlanContents) -> list[str]:
        again = ["attention between its projections"] if self.attention else []
        again += (
            ["all but products, attention and exchanges between ranks"] if self.elementwise else []
        )
        again += (
            [f"{len(self.layers)} of {len(plan.layers)} layers"]
            if self.layers and self.budget is None
            else []
        )
        if self.budget is not None:
            again.append(
                f"as few layers as bring what layers keep below {self.budget:,} bytes on a rank"
            )
        tiles = f", in tiles of {self.tile:,} tokens" if self.tile else ""
        again += [f"{counted(self.modules)}{tiles}"] if self.modules else []
        kept = f"; results of {', '.join(self.keep)} are kept" if self.keep else ""
        return [f"computed again in the backward pass: {', '.join(again)}{kept}"]


def recomputed(plan: PlanContents) -> RecomputePlan:
    """Return the plan of recomputation; an empty :class:`RecomputePlan` if nothing is recomputed."""
    return plan.feature(RecomputePlan) or RecomputePlan()


BLOCK = 256  # entries per scale
BYTES = 1 + 4 / BLOCK  # bytes per entry, including the entry's fraction of the scale
FEW = 16
"""If activations are saved in 8 bits, tensors with at most 1/16 as many entries as the layer's input stay exact.

These are log-sum-exps and statistics of norms, by which other values are divided, rotary tables, and router logits.
"""


@dataclass(frozen=True)
class CompressPlan(Feature):
    """Plan to save activations for the backward pass in 8 bits."""

    least: int  # bytes of the smallest tensor that is compressed

    def describe(self, plan: PlanContents) -> list[str]:
        return [
            f"in 8 bits: what layers keep for the backward pass, in tensors of {self.least:,} bytes and more"
        ]


def compressed(plan: PlanContents) -> int | None:
    """Return the bytes of the smallest activation that is saved in 8 bits; ``None`` if activations stay
    uncompressed.
    """
    planned = plan.feature(CompressPlan)
    return None if planned is None else planned.least


@dataclass(frozen=True)
class OffloadPlan(Feature):
    """Plan to offload tensors to the CPU."""

    optimizer: bool = False  # whether the optimizer's state is offloaded; updates run on the CPU
    # Whether shards of parameters and gradients are offloaded; updates run on the CPU
    parameters: bool = False
    # bytes of the smallest activation that is offloaded until its backward pass; ``None``: no activation is offloaded
    activations: int | None = None

    def describe(self, plan: PlanContents) -> list[str]:
        what = ["the optimizer's state"] if self.optimizer else []
        what += ["shards of parameters and gradients"] if self.parameters else []
        if self.activations is not None:
            what.append(
                f"what layers keep for the backward pass, in tensors of {self.activations:,} bytes and more"
            )
        return [f"on the host: {', '.join(what)}"]


def offloaded(plan: PlanContents) -> OffloadPlan:
    """Return the plan of offloading; an empty :class:`OffloadPlan` if nothing is offloaded."""
    return plan.feature(OffloadPlan) or OffloadPlan()


def refuse_aside(name: str, asked: str = "offload_optimizer=True") -> None:
    """Raise :class:`ConfigError` if the optimizer ``name`` cannot update copies of the weights in place of the weights.

    The option ``asked`` needs such copies, for example on the CPU.
    """
    if name in ("adafactor", "muon"):
        raise ConfigError(
            f"{asked} needs an optimizer that can update separate copies of weights, such as those of torch or "
            f"bitsandbytes, got {name!r}: use 'adamw_torch' or 'adamw_8bit'"
        )


@dataclass(frozen=True)
class ScoresPlan(Feature):
    """Describe eager attention, which saves attention scores for every head and pair of tokens."""

    heads: int  # query heads of a layer, over all tensor ranks


def heads_with_scores(plan: PlanContents) -> int:
    """Return how many heads of a layer save attention scores for the backward pass; 0 for fused attention, and for
    context parallelism.
    """
    planned = plan.feature(ScoresPlan)
    return 0 if planned is None or plan.layout.cuts_sequences else planned.heads


# DoRA's parameter, whose forward reads the norms of the weight's rows
_READS = "lora_magnitude_vector"


@dataclass(frozen=True)
class ProductsPlan(Feature):
    """Plan the projections whose matrix products are in 8 bits. Names are full module names."""

    modules: tuple[str, ...]  # the projections
    rowwise: bool = False  # whether each row has a scale; otherwise each tensor has one scale
    left_out: tuple[
        tuple[str, str], ...
    ] = ()  # projections of the layers that are not in 8 bits, each with the reason
    gathers: bool = False  # whether data ranks all-gather these weights in 8 bits

    def describe(self, plan: PlanContents) -> list[str]:
        what = "rows" if self.rowwise else "tensors"
        lines = [f"products in 8 bits, scaled by {what}: {counted(self.modules)}"]
        if gathered := gathered_in_8_bits(plan):
            others = (
                ", but for those whose adapters read the weight"
                if len(gathered) < len(self.modules)
                else ""
            )
            lines.append(f"data ranks gather their weights in 8 bits{others}")
        for why in dict.fromkeys(why for _, why in self.left_out):
            lines.append(
                f"not in 8 bits ({why}): {counted([name for name, one in self.left_out if one == why])}"
            )
        return lines


def counted(names: Sequence[str]) -> str:
    """Return ``names`` of modules as a text that lists each kind of module (names that differ only in layer numbers)
    with its count.
    """
    wild = [wild_name(name) for name in names]
    return ", ".join(f"{name} x{wild.count(name)}" for name in dict.fromkeys(wild))


def weights_in_8_bits(plan: PlanContents) -> frozenset[str]:
    """Return the names of the weights whose matrix products are computed in 8 bits."""
    planned = plan.feature(ProductsPlan)
    return (
        frozenset() if planned is None else frozenset(f"{name}.weight" for name in planned.modules)
    )


def gathered_in_8_bits(plan: PlanContents) -> frozenset[str]:
    """Return the names of the weights that data ranks all-gather in 8 bits.

    These are the weights of matrix products in 8 bits, except the weights whose norms DoRA reads.
    """
    planned = plan.feature(ProductsPlan)
    if planned is None or not planned.gathers or plan.layout.dp_shard == 1:
        return frozenset()
    return weights_in_8_bits(plan) - {
        adapter.base for adapter in plan.adapters if adapter.kept_in == _READS
    }


@dataclass(frozen=True)
class TowersPlan(Feature):
    """Plan the vision and audio towers and the projectors of a multimodal model, and the layers that read only the
    outputs of towers.
    """

    text: str  # name of the text model; empty if the model itself is the text model
    # Modules and parameters outside the text model, except the head; and the layers that read only their outputs
    items: tuple[str, ...]
    parameters: int  # number of entries of their parameters
    read_inside: tuple[
        str, ...
    ] = ()  # inputs of the text model, other than embeddings, with outputs of towers
    # number of first layers that read ``read_inside``, if only those do; 0: any layer may, or no layer does
    first_layers: int = 0

    def describe(self, plan: PlanContents) -> list[str]:
        where = "every tensor rank" if plan.layout.tp > 1 else "every rank"
        gathered = "; data ranks gather them together" if plan.layout.data_world > 1 else ""
        what = f"{', '.join(dict.fromkeys(map(wild_name, self.items)))}, {self.parameters:,} parameters"
        beside = f"beside the text of {self.text}" if self.text else "not used for tokens"
        return [f"{beside}: {what}, whole on {where}{gathered}"]

    def holds(self, name: str) -> bool:
        """Return whether the parameter or module ``name`` belongs to the towers: it is one of ``items``, or inside one
        of them.
        """
        return any(name == item or name.startswith(f"{item}.") for item in self.items)


@dataclass(frozen=True)
class OwnLossPlan(Feature):
    """Describe a loss that the model itself computes, as a mean over rows or over the labels that are not ignored."""

    over: str  # ``"rows"`` or ``"labels"``
    # Whether the model divides the loss by ``num_items_in_batch``, if it is passed
    divides: bool = False

    def describe(self, plan: PlanContents) -> list[str]:
        return [
            f"loss: the model's own, a mean over {self.over}; microbatches count by their {self.over}"
        ]


@dataclass(frozen=True)
class FusedAdaptersPlan(Feature):
    """Plan which projections compute their LoRA by one fused operator, and which leave it to PEFT's code."""

    fused: int  # number of projections with fused LoRA
    others: tuple[tuple[str, str], ...] = ()  # other projections with LoRA, each with the reason

    def computes(self, weight: str) -> bool:
        """Return whether the LoRA of the projection with this weight is computed by the fused operator."""
        return weight.removesuffix(".weight") not in dict(self.others)

    def describe(self, plan: PlanContents) -> list[str]:
        line = f"LoRA by one operator: {self.fused:,} projections"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.others:
            reasons.setdefault(reason, []).append(name)
        kept = [f"{counted(tuple(names))} ({reason})" for reason, names in reasons.items()]
        return [f"{line}; by PEFT's own code: {', '.join(kept)}" if kept else line]


def is_fused(plan: PlanContents, weight: str) -> bool:
    """Return whether the LoRA of a projection's weight is fused. The projection's input is then saved once and in its
    own dtype.
    """
    planned = plan.feature(FusedAdaptersPlan)
    return planned is not None and planned.computes(weight)
