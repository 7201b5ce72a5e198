"""Draw what the guides describe, by the library's own plans and schedules: docs/drawings/*.svg.

python scripts/drawings.py [--check]

A matrix is drawn as the plan cuts it: the share of every rank is taken from a tensor of numbered entries, and an entry
has the colour of the rank that got it. Nothing is drawn by hand, so a cut that changes changes its picture.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from svg_themes import GROUND, INK, in_both
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.extras.schedules.schedule_plot import IDLE, draw
from hfscale.parallel.pipeline.orders import order
from hfscale.parallel.pipeline.simulation import Costs, simulate
from hfscale.plan import ParameterPlan
from hfscale.plan.sequence_split import Split

FOLDER = Path(__file__).parents[1] / "docs" / "drawings"
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
_SHARED = "#d8d8d8"
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LLAMA = LlamaConfig(**_SIZES, intermediate_size=128, vocab_size=96)
MIXTURE = Qwen3MoeConfig(
    **_SIZES,
    intermediate_size=128,
    head_dim=8,
    moe_intermediate_size=32,
    num_experts=4,
    vocab_size=96,
)
_ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
_MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
CUTS: dict[str, tuple[PreTrainedConfig, dict[str, int], list[str]]] = {
    "tensor": (LLAMA, {"tp_size": 4}, [*_ATTENTION, *_MLP, "input_layernorm"]),
    "data": (LLAMA, {"dp_shard_size": 2, "tp_size": 2}, [*_ATTENTION, *_MLP, "input_layernorm"]),
    "experts": (
        MIXTURE,
        {"ep_size": 4},
        ["self_attn.q_proj", "mlp.gate", "experts.gate_up_proj", "experts.down_proj"],
    ),
}
_DARK = {
    'rect[fill="#ffffff"]': f"fill: {GROUND}",
    'rect[stroke="#ffffff"]': f"stroke: {GROUND}",
    f'rect[fill="{_SHARED}"]': "fill: #6b7280",
    'text[fill="#222222"]': f"fill: {INK}",
}
_DARK_SCHEDULES = {
    'path[style="fill: #ffffff"]': f"fill: {GROUND}",
    'path[style*="stroke: #ffffff"]': f"stroke: {GROUND}",
    f'path[style="fill: {IDLE}"]': "fill: #3a3f4b",
    'text[style*="fill: #222222"], text[style*="fill: #444444"], text:not([style*="fill"])': f"fill: {INK}",
}
Band = tuple[int, int, int, int, frozenset[int]]
"""Rows from, rows to, columns from, columns to, and who has them."""


def bands(planned: ParameterPlan, ranks: Sequence[dict[str, int]]) -> Iterator[Band]:
    """Rectangles of a matrix whose entries are on the same ranks."""
    numbers = torch.arange(torch.Size(planned.shape).numel()).view(planned.shape)
    owners = torch.zeros(numbers.numel(), dtype=torch.int64)
    for rank, places in enumerate(ranks):
        owners[planned.take(numbers, places).flatten()] += 1 << rank
    grid = owners.view(-1, planned.shape[-1])
    rows = [0, *((grid[1:] != grid[:-1]).any(1).nonzero().flatten() + 1).tolist(), len(grid)]
    columns = [
        0,
        *((grid[:, 1:] != grid[:, :-1]).any(0).nonzero().flatten() + 1).tolist(),
        grid.shape[1],
    ]
    for (top, bottom), (left, right) in product(pairwise(rows), pairwise(columns)):
        bits = int(grid[top, left])
        yield (
            top,
            bottom,
            left,
            right,
            frozenset(rank for rank in range(len(ranks)) if bits >> rank & 1),
        )


def cuts(config: PreTrainedConfig, layout: dict[str, int], names: Sequence[str]) -> str:
    """One layer's matrices, beside each other."""
    parallel = ParallelConfig(**layout)
    plan = hfscale.plan(config, parallel)
    world = parallel.total_size
    inner = parallel.tp_size
    ranks = [{"tp": r % inner, "dp_shard": r // inner, "ep": r // inner} for r in range(world)]
    shapes = list[str]()
    left = 10
    tallest = 0
    for name in names:
        planned = next(
            each
            for each in plan.parameters
            if f"layers.0.{name}" in each.name or f".{name}" in each.name
        )
        rows = torch.Size(planned.shape[:-1]).numel()
        columns = planned.shape[-1]
        scale = 4 if rows < 8 else 1  # or a vector could not be seen
        for top, bottom, begin, end, who in bands(planned, ranks):
            colour = _COLOURS[min(who)] if len(who) == 1 else _SHARED
            shapes.append(
                _box(left + begin, 46 + top * scale, end - begin, (bottom - top) * scale, colour)
            )
        label = name.rpartition(".")[2]
        shapes.append(_text(left, 36, label))
        left = left + max(columns, 7 * len(label)) + 14
        tallest = max(tallest, rows)
    return _page(shapes, left, tallest + 86, _legend(world, tallest + 66, shared=True))


def tokens(ranks: int = 4, total: int = 32) -> str:
    """Which tokens of a sequence each context rank has."""
    split = Split(total, ranks)
    width = 22
    shapes = list[str]()
    for rank in range(ranks):
        for place in split.places(rank).tolist():
            shapes.append(_box(10 + place * width, 30, width - 2, 26, _COLOURS[rank]))
            shapes.append(
                _text(10 + place * width + width / 2 - 1, 47, str(place), "middle", "#ffffff")
            )
    return _page(
        [_text(10, 20, "tokens of a sequence"), *shapes],
        20 + total * width,
        100,
        _legend(ranks, 80),
    )


def _box(left: float, top: float, width: float, height: float, colour: str) -> str:
    place = f'x="{left}" y="{top}" width="{width}" height="{height}"'
    return f'<rect {place} fill="{colour}" stroke="#ffffff" stroke-width="0.8"/>'


def _text(
    left: float, top: float, text: str, anchor: str = "start", colour: str = "#222222"
) -> str:
    return f'<text x="{left}" y="{top}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _legend(ranks: int, top: float, shared: bool = False) -> list[str]:
    entries = [(f"rank {rank}", colour) for rank, colour in enumerate(_COLOURS[:ranks])]
    entries += [("whole on several ranks", _SHARED)] if shared else []
    return [
        part
        for place, (name, colour) in enumerate(entries)
        for part in (
            _box(10 + 80 * place, top, 12, 12, colour),
            _text(27 + 80 * place, top + 10, name),
        )
    ]


def _page(shapes: list[str], width: float, height: float, legend: list[str]) -> str:
    wide = max(width, 500)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{height}" viewBox="0 0 {wide} {height}" '
    head += 'font-family="sans-serif" font-size="11">'
    ground = f'<rect width="{wide}" height="{height}" fill="#ffffff"/>'
    return in_both("\n".join([head, ground, *shapes, *legend, "</svg>"]) + "\n", _DARK)


def schedules() -> str:
    """Three schedules of eight microbatches over four ranks, on one scale."""
    shown: list[tuple[str, Any]] = []
    for name, stages in (("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2)):
        half = Costs(1 / stages, 2 / stages, 1 / stages, 1 / stages)  # of a rank's forward pass
        shown.append(("", simulate(order(name, 4, 8, stages), half, name, 8)))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "schedules.svg"
        draw(path, shown)
        text = "\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n"
    return in_both(text, _DARK_SCHEDULES)


def drawings() -> dict[str, str]:
    """File -> its text."""
    found = {f"{name}.svg": cuts(*what) for name, what in CUTS.items()}
    return {**found, "tokens.svg": tokens(), "schedules.svg": schedules()}


def main() -> int:
    """Write them, or say which are out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where one is out of date"
    )
    check = parser.parse_args().check
    stale = []
    for name, text in drawings().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                FOLDER.mkdir(exist_ok=True)
                path.write_text(text)
    print(
        f"out of date: {', '.join(stale)}"
        if check and stale
        else "\n".join(sorted(stale)) or "nothing changed"
    )
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
