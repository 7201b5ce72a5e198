"""The accounting of the sources, for one model: where 16 bytes per parameter, ZeRO's shares and activations come from.

Formulas as they are in the papers, of their models and types; what hfscale holds of this class is the last line of a
table, where the two can be compared.
"""

from dataclasses import dataclass

from ...plan.table import human
from .model_summary import ModelSummary

ADAM = (
    ("weights in 16 bits", 2),
    ("gradients in 16 bits", 2),
    ("weights in 32 bits", 4),
    ("first moments", 4),
    ("second moments", 4),
)
"""Bytes of each parameter under mixed precision with Adam (Rajbhandari et al. 2020, section 3.1)."""

_STATES = sum(size for _, size in ADAM[2:])
NF4_BITS, SCALE_BITS, DOUBLE_BITS = 4.0, 32 / 64, 8 / 64 + 32 / (64 * 256)
"""Bits of a weight, and of its share of scales without and with double quantization (Dettmers et al. 2023)."""


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        title: with its source.
        rows: name, bytes, how they come about.
    """

    title: str
    rows: tuple[tuple[str, float, str], ...]

    def __str__(self) -> str:
        names = max(len(name) for name, _, _ in self.rows)
        sizes = [human(round(size)) for _, size, _ in self.rows]
        wide = max(map(len, sizes))
        rows = zip(self.rows, sizes, strict=True)
        return "\n".join(
            [self.title, *(f"  {row[0].ljust(names)}  {size.rjust(wide)}  {row[2]}" for row, size in rows)]
        )


def zero_stages(parameters: float, ranks: int) -> dict[str, float]:
    """Bytes of a rank by stage of ZeRO (Rajbhandari et al. 2020, figure 1), with mixed-precision Adam."""
    weights, gradients, states = 2 * parameters, 2 * parameters, _STATES * parameters
    return {
        "replicas": weights + gradients + states,
        "ZeRO-1": weights + gradients + states / ranks,
        "ZeRO-2": weights + (gradients + states) / ranks,
        "ZeRO-3": (weights + gradients + states) / ranks,
    }


def activations(hidden: int, heads: int, sequence: int, batch: int, tp: int) -> dict[str, float]:
    """Bytes of one layer of GPT in 16 bits with dropout (Korthikanti et al. 2022, table 2)."""
    unit, scores = sequence * batch * hidden, 5 * heads * sequence / hidden
    return {
        "no parallelism": unit * (34 + scores),
        "tensor": unit * (10 + 24 / tp + scores / tp),
        "tensor and sequence": unit * (34 / tp + scores / tp),
        "tensor, selective": unit * (10 + 24 / tp),
        "tensor and sequence, selective": unit * 34 / tp,
        "full recomputation": unit * 2,
    }


def lora_parameters(summary: ModelSummary, rank: int) -> int:
    """Entries of factors on all linear layers (Hu et al. 2021): ``r`` for each row and each column of a matrix."""
    shape = summary.shape
    width = shape.mlp_width
    attention = 2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys)
    mlp = (3 if shape.gated else 2) * (shape.hidden + width)
    return shape.layers * rank * (attention + mlp)


def explain(
    summary: ModelSummary, *, ranks: int = 64, tp: int = 8, sequence: int = 4096, batch: int = 1, rank: int = 16
) -> list[Table]:
    """The tables of a model.

    Args:
        ranks: data ranks that ZeRO shares over.
        tp: tensor ranks.
        sequence: tokens of a sequence.
        batch: sequences of a microbatch.
        rank: of LoRA.
    """
    return [
        _precision(summary),
        _zero(summary, ranks),
        _activations(summary, tp, sequence, batch),
        _adapters(summary, rank),
    ]


def _precision(summary: ModelSummary) -> Table:
    count = summary.shape.weights
    rows: list[tuple[str, float, str]] = []
    rows += [(name, size * count, f"{size} bytes x {count:,} parameters") for name, size in ADAM]
    rows.append(("together", sum(size for _, size in ADAM) * count, "16 bytes for each parameter"))
    rows.append(
        ("hfscale, as asked", summary.states * count, f"{summary.states:.1f} bytes: weights, gradients, optimizer")
    )
    return Table("Mixed precision with Adam (Micikevicius et al. 2018; Rajbhandari et al. 2020)", tuple(rows))


def _zero(summary: ModelSummary, ranks: int) -> Table:
    says = {
        "replicas": "2 + 2 + 12",
        "ZeRO-1": f"2 + 2 + 12/{ranks}",
        "ZeRO-2": f"2 + (2 + 12)/{ranks}",
        "ZeRO-3": f"(2 + 2 + 12)/{ranks}, and a layer gathered at a time: dp_shard_size",
    }
    rows = [(name, size, says[name]) for name, size in zero_stages(summary.shape.weights, ranks).items()]
    return Table(f"States of a rank, shared over {ranks} data ranks (Rajbhandari et al. 2020)", tuple(rows))


def _activations(summary: ModelSummary, tp: int, sequence: int, batch: int) -> Table:
    layers = summary.shape.layers
    found = activations(summary.shape.hidden, summary.heads, sequence, batch, tp)
    says = {
        "no parallelism": "s b h (34 + 5 a s/h)",
        "tensor": "s b h (10 + 24/t + 5 a s/(h t))",
        "tensor and sequence": "s b h/t (34 + 5 a s/h)",
        "tensor, selective": "s b h (10 + 24/t): scores computed again",
        "tensor and sequence, selective": "34 s b h/t",
        "full recomputation": "2 s b h: the inputs of layers",
    }
    rows = [(name, layers * size, says[name]) for name, size in found.items()]
    own = layers * summary.kept.cut * sequence * batch
    rows.append((f"{summary.family} in hfscale", own, "one rank, as this class keeps it; scores are not kept"))
    title = f"Activations of {layers} layers of GPT, s = {sequence:,}, b = {batch}, t = {tp} (Korthikanti et al. 2022)"
    return Table(title, tuple(rows))


def _adapters(summary: ModelSummary, rank: int) -> Table:
    base, factors = summary.shape.weights, lora_parameters(summary, rank)
    rows = (
        ("full, in 16 bits", 16 * base, "16 bytes for each parameter"),
        ("LoRA: base", 2 * base, "16 bits, frozen: no gradients, no optimizer"),
        ("LoRA: factors", 16 * factors, f"{factors:,} parameters of rank {rank} on all linear layers, 16 bytes each"),
        ("QLoRA: base", base * (NF4_BITS + SCALE_BITS) / 8, "4 bits, and 32 for each 64 weights"),
        ("QLoRA: base, twice", base * (NF4_BITS + DOUBLE_BITS) / 8, "scales in 8 bits: 0.127 bits a weight, not 0.5"),
    )
    return Table("Fine-tuning (Hu et al. 2021; Dettmers et al. 2023)", rows)
