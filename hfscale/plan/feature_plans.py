"""Hold what each feature of a layout decided, beyond cuts and reductions of parameters: one frozen class each."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..models.names import wild_name
from .contents import Feature, PlanContents

ROUTES = "routes"
"""An argument of a pass that the model itself never sees: the experts of every token, ``[b, s, layers, k]``."""


@dataclass(frozen=True)
class RecomputePlan(Feature):
    """Plan of modules whose forward pass runs again in the backward pass. Names are full module names."""

    layers: tuple[
        str, ...
    ] = ()  # recomputed layers, of which only the input is kept; under a budget, the candidates
    modules: tuple[str, ...] = ()  # modules in the layers that are recomputed by themselves
    attention: bool = False  # whether attention is recomputed between its query, key, value and output projections
    # Whether all but products, attention and exchanges is recomputed in every layer.
    elementwise: bool = False
    tile: int = 0  # tokens of a tile of ``modules``; 0: they run whole
    keep: tuple[
        str, ...
    ] = ()  # operators in ``layers`` whose results are kept (selective checkpointing)
    # Bytes that the layers of a rank may keep; ``None``: all ``layers`` are recomputed.
    budget: int | None = None
    # tokens of the microbatch that the budget holds for; ``None``: of the largest one in the first step
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
    """Return what the plan recomputes; an empty :class:`RecomputePlan` if nothing."""
    return plan.feature(RecomputePlan) or RecomputePlan()


BLOCK = 256  # entries per scale
BYTES = 1 + 4 / BLOCK  # bytes per entry, including its fraction of the scale
FEW = 16
"""Tensors smaller than the layer's input by this factor stay exact: log-sum-exps and statistics of norms, by which
everything else is divided, rotary tables, router logits."""


@dataclass(frozen=True)
class CompressPlan(Feature):
    """Plan of activations that are saved for the backward pass in 8 bits."""

    least: int  # bytes of the smallest tensor that is compressed

    def describe(self, plan: PlanContents) -> list[str]:
        return [
            f"in 8 bits: what layers keep for the backward pass, in tensors of {self.least:,} bytes and more"
        ]


def compressed(plan: PlanContents) -> int | None:
    """Return the bytes of the smallest activation saved in 8 bits, or ``None`` if activations are saved as they are."""
    planned = plan.feature(CompressPlan)
    return None if planned is None else planned.least


@dataclass(frozen=True)
class OffloadPlan(Feature):
    """Plan of tensors that are offloaded to the CPU."""

    optimizer: bool = False  # the optimizer's state; updates of it run on the CPU
    parameters: bool = False  # this rank's shards of parameters and of their gradients; updates of them run on the CPU
    # bytes of the smallest activation that is offloaded until its backward pass; ``None``: none are
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
    """Return what the plan offloads; an empty :class:`OffloadPlan` if nothing."""
    return plan.feature(OffloadPlan) or OffloadPlan()


def refuse_aside(name: str, asked: str = "offload_optimizer=True") -> None:
    """Refuse an optimizer that cannot update copies of single weights, as ``asked`` requires."""
    if name in ("adafactor", "muon"):
        raise ConfigError(
            f"{asked} needs an optimizer of torch or bitsandbytes, which can step copies of weights, got {name!r}: "
            "use 'adamw_torch' or 'adamw_8bit'"
        )


@dataclass(frozen=True)
class ScoresPlan(Feature):
    """Plan of eager attention, which keeps a score for every head and pair of tokens."""

    heads: int  # query heads of a layer, over all tensor ranks


def heads_with_scores(plan: PlanContents) -> int:
    """Return how many heads keep scores; 0 for fused attention, and if sequences are cut over context ranks."""
    planned = plan.feature(ScoresPlan)
    return 0 if planned is None or plan.layout.cuts_sequences else planned.heads


_READS = "lora_magnitude_vector"  # DoRA's, of the norms of the weight's rows


@dataclass(frozen=True)
class ProductsPlan(Feature):
    """Plan of projections whose products are in 8 bits. Names are full module names."""

    modules: tuple[str, ...]  # the projections
    rowwise: bool = False  # a scale for each row; else one for each tensor
    left_out: tuple[
        tuple[str, str], ...
    ] = ()  # projections of the layers that stay as they are, each with why
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
    """Return the kinds of modules among ``names``, each with how many there are."""
    wild = [wild_name(name) for name in names]
    return ", ".join(f"{name} x{wild.count(name)}" for name in dict.fromkeys(wild))


def weights_in_8_bits(plan: PlanContents) -> frozenset[str]:
    """Return the names of the parameters whose products are in 8 bits."""
    planned = plan.feature(ProductsPlan)
    return (
        frozenset() if planned is None else frozenset(f"{name}.weight" for name in planned.modules)
    )


def gathered_in_8_bits(plan: PlanContents) -> frozenset[str]:
    """Return the parameters that data ranks gather in 8 bits: not those whose rows DoRA takes the norms of."""
    planned = plan.feature(ProductsPlan)
    if planned is None or not planned.gathers or plan.layout.dp_shard == 1:
        return frozenset()
    return weights_in_8_bits(plan) - {
        adapter.base for adapter in plan.adapters if adapter.kept_in == _READS
    }


@dataclass(frozen=True)
class TowersPlan(Feature):
    """Plan of towers and projectors around a text model, and of layers that read only their output (images, audio)."""

    text: str  # name of the text model; empty if that is the model itself
    items: tuple[str, ...]  # modules and parameters around it, its head left out, and layers
    parameters: int  # how many numbers they hold
    read_inside: tuple[
        str, ...
    ] = ()  # inputs of the text model by which its layers read them, besides the embeddings
    # How many of the first layers alone read them; 0 if any may, or none does.
    first_layers: int = 0

    def describe(self, plan: PlanContents) -> list[str]:
        where = "every tensor rank" if plan.layout.tp > 1 else "every rank"
        gathered = "; data ranks gather them together" if plan.layout.data_world > 1 else ""
        what = f"{', '.join(dict.fromkeys(map(wild_name, self.items)))}, {self.parameters:,} parameters"
        beside = f"beside the text of {self.text}" if self.text else "not used for tokens"
        return [f"{beside}: {what}, whole on {where}{gathered}"]

    def holds(self, name: str) -> bool:
        """Return whether a parameter or a module is one of the items, or inside of one."""
        return any(name == item or name.startswith(f"{item}.") for item in self.items)


@dataclass(frozen=True)
class OwnLossPlan(Feature):
    """Plan of a loss computed by the model itself, as a mean over rows or over the labels that are not ignored."""

    over: str  # ``"rows"`` or ``"labels"``
    divides: bool = False  # whether it is divided by ``num_items_in_batch``, if that is passed

    def describe(self, plan: PlanContents) -> list[str]:
        return [
            f"loss: the model's own, a mean over {self.over}; microbatches count by their {self.over}"
        ]


@dataclass(frozen=True)
class FusedAdaptersPlan(Feature):
    """Plan of LoRA computed by one operator for each projection; PEFT's own code computes what is left."""

    fused: int  # how many projections
    others: tuple[tuple[str, str], ...] = ()  # other projections with LoRA, each with the reason

    def computes(self, weight: str) -> bool:
        """Return whether the adapters of a projection's weight are fused."""
        return weight.removesuffix(".weight") not in dict(self.others)

    def describe(self, plan: PlanContents) -> list[str]:
        line = f"LoRA by one operator: {self.fused:,} projections"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.others:
            reasons.setdefault(reason, []).append(name)
        kept = [f"{counted(tuple(names))} ({reason})" for reason, names in reasons.items()]
        return [f"{line}; by PEFT's own code: {', '.join(kept)}" if kept else line]


def is_fused(plan: PlanContents, weight: str) -> bool:
    """Return whether the adapters of a projection's weight keep its input as it is, for all that read it."""
    planned = plan.feature(FusedAdaptersPlan)
    return planned is not None and planned.computes(weight)
