"""Tabulate the papers' memory formulas for one model: 16 bytes per parameter, ZeRO, activations, LoRA and QLoRA.

    python scripts/explain_memory.py meta-llama/Llama-3.1-8B --data-ranks 64 --tp 8

Formulas as they are in the papers, of their models and types; what hfscale holds of this class is the last line of a
table, where the two can be compared. Reads only the config.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hfscale.cli.look import show
from hfscale.cli.model_flags import (
    add_model_arguments,
    auto_class_of,
    check_place,
    load_config,
    remote_code,
    tokens_of,
)
from hfscale.cost.tools.model_summary import ModelSummary, summarize
from hfscale.errors import ConfigError
from hfscale.plan.columns import aligned
from hfscale.plan.table import human

_SIZES = {"--data-ranks": (64, "that ZeRO shares over"), "--tp": (8, "tensor ranks")}
_SIZES |= {"--batch-size": (1, "sequences of a microbatch"), "--rank": (16, "of LoRA's factors")}

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
    """Hold one table."""

    title: str  # with its source
    rows: tuple[tuple[str, float, str], ...]  # name, bytes, how they come about

    def __str__(self) -> str:
        rows = [(f"  {name}", human(round(size)), how) for name, size, how in self.rows]
        return "\n".join([self.title, *aligned(rows, left=(0, 2))])


def zero_stages(parameters: float, ranks: int) -> dict[str, float]:
    """Return the bytes of a rank per ZeRO stage (Rajbhandari et al. 2020, figure 1), with mixed-precision Adam."""
    weights = 2 * parameters
    gradients = 2 * parameters
    states = _STATES * parameters
    return {
        "replicas": weights + gradients + states,
        "ZeRO-1": weights + gradients + states / ranks,
        "ZeRO-2": weights + (gradients + states) / ranks,
        "ZeRO-3": (weights + gradients + states) / ranks,
    }


def activations(hidden: int, heads: int, sequence: int, batch: int, tp: int) -> dict[str, float]:
    """Return the activation bytes of a GPT layer in 16 bits with dropout (Korthikanti et al. 2022, table 2)."""
    unit = sequence * batch * hidden
    scores = 5 * heads * sequence / hidden
    return {
        "no parallelism": unit * (34 + scores),
        "tensor": unit * (10 + 24 / tp + scores / tp),
        "tensor and sequence": unit * (34 / tp + scores / tp),
        "tensor, selective": unit * (10 + 24 / tp),
        "tensor and sequence, selective": unit * 34 / tp,
        "full recomputation": unit * 2,
    }


def lora_parameters(summary: ModelSummary, rank: int) -> int:
    """Return the entries of LoRA factors on all linear layers (Hu et al. 2021): ``r`` per matrix row and column."""
    shape = summary.shape
    attention = 2 * (shape.hidden + shape.queries) + 2 * (shape.hidden + shape.keys)
    mlp = (3 if shape.gated else 2) * (shape.hidden + shape.mlp_width)
    return shape.layers * rank * (attention + mlp)


def explain(
    summary: ModelSummary,
    *,
    ranks: int = 64,
    tp: int = 8,
    sequence: int = 4096,
    batch: int = 1,
    rank: int = 16,
) -> list[Table]:
    """Return a model's tables: ZeRO over ``ranks``, activations over ``tp``, and LoRA factors of rank ``rank``."""
    count = summary.shape.weights
    layers = summary.shape.layers
    states = summary.states
    adam: list[tuple[str, float, str]]
    adam = [(name, size * count, f"{size} bytes x {count:,} parameters") for name, size in ADAM]
    adam.append(("together", sum(size for _, size in ADAM) * count, "16 bytes for each parameter"))
    adam.append(
        ("hfscale, as asked", states * count, f"{states:.1f} bytes: weights, gradients, optimizer")
    )
    zero = _rows(zero_stages(count, ranks), [how.format(ranks=ranks) for how in _ZERO])
    kept = {
        name: layers * size
        for name, size in activations(
            summary.shape.hidden, summary.heads, sequence, batch, tp
        ).items()
    }
    own = layers * summary.kept["data", "none"].cut * sequence * batch
    of_class = (
        f"{summary.family} in hfscale",
        own,
        "one rank, as this class keeps it; scores are not kept",
    )
    of_gpt = f"Activations of {layers} layers of GPT, s = {sequence:,}, b = {batch}, t = {tp} (Korthikanti et al. 2022)"
    return [
        Table(
            "Mixed precision with Adam (Micikevicius et al. 2018; Rajbhandari et al. 2020)",
            tuple(adam),
        ),
        Table(f"States of a rank, shared over {ranks} data ranks (Rajbhandari et al. 2020)", zero),
        Table(of_gpt, (*_rows(kept, _ACTIVATIONS), of_class)),
        _adapters(summary, rank),
    ]


_ZERO = (
    "2 + 2 + 12",
    "2 + 2 + 12/{ranks}",
    "2 + (2 + 12)/{ranks}",
    "(2 + 2 + 12)/{ranks}, and a layer gathered at a time: dp_shard_size",
)
_ACTIVATIONS = (
    "s b h (34 + 5 a s/h)",
    "s b h (10 + 24/t + 5 a s/(h t))",
    "s b h/t (34 + 5 a s/h)",
    "s b h (10 + 24/t): scores computed again",
    "34 s b h/t",
    "2 s b h: the inputs of layers",
)


def _rows(sizes: dict[str, float], how: Sequence[str]) -> tuple[tuple[str, float, str], ...]:
    return tuple((name, size, text) for (name, size), text in zip(sizes.items(), how, strict=True))


def _adapters(summary: ModelSummary, rank: int) -> Table:
    base = summary.shape.weights
    factors = lora_parameters(summary, rank)
    rows = (
        ("full, in 16 bits", 16 * base, "16 bytes for each parameter"),
        ("LoRA: base", 2 * base, "16 bits, frozen: no gradients, no optimizer"),
        (
            "LoRA: factors",
            16 * factors,
            f"{factors:,} parameters of rank {rank} on all linear layers, 16 bytes each",
        ),
        ("QLoRA: base", base * (NF4_BITS + SCALE_BITS) / 8, "4 bits, and 32 for each 64 weights"),
        (
            "QLoRA: base, twice",
            base * (NF4_BITS + DOUBLE_BITS) / 8,
            "scales in 8 bits: 0.127 bits a weight, not 0.5",
        ),
    )
    return Table("Fine-tuning (Hu et al. 2021; Dettmers et al. 2023)", rows)


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    for flag, (default, text) in _SIZES.items():
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--sequence-length", default="4096", metavar="N", help="tokens of a sequence, as 8K (or 4K)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    arguments = parser.parse_args(argv)
    sizes = {flag: getattr(arguments, flag[2:].replace("-", "_")) for flag in _SIZES}
    for flag, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{flag} {size} is invalid: use a whole number of at least 1")
    sequence = tokens_of(arguments.sequence_length, "--sequence-length")
    check_place(arguments.model)
    config = load_config(arguments.model, arguments.trust_remote_code)
    dtype = arguments.dtype or "float32"
    more: dict[str, Any] = remote_code(arguments)
    more |= {"auto_class": auto_class_of(arguments.auto_class), "dtype": dtype}
    found = explain(
        summarize(
            config,
            mixed_precision="bf16" if dtype == "float32" else "no",
            sequence=sequence,
            **more,
        ),
        ranks=arguments.data_ranks,
        tp=arguments.tp,
        sequence=sequence,
        batch=arguments.batch_size,
        rank=arguments.rank,
    )
    rows = [
        [dict(zip(("name", "bytes", "how"), row, strict=True)) for row in table.rows]
        for table in found
    ]
    document = [
        {"title": table.title, "rows": each} for table, each in zip(found, rows, strict=True)
    ]
    show(arguments, document, "\n\n".join(map(str, found)))


if __name__ == "__main__":
    main()
