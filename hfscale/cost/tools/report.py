"""What an estimate says: for every pipeline rank bytes by kind, for the step seconds by term, and a verdict."""

import json
from dataclasses import dataclass, field
from typing import Any

from ...parallel.pipeline import Timeline
from ...plan.table import human
from ..model.machine import Machine
from ..model.memory import MemoryEstimate
from ..model.step_time import StepTime

FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"
OVERHEAD = 0.3 * 2**30  # what libraries and collectives take beside torch's tensors
FRAGMENTS = 1.1  # of activations: what an allocator needs for them, in the public runs


@dataclass(frozen=True)
class StageEstimate:
    """One pipeline rank.

    Attributes:
        rank: its number.
        layers: how many it has.
        seconds: of a microbatch's forward and backward pass.
        memory: bytes by kind.
    """

    rank: int
    layers: int
    seconds: float
    memory: MemoryEstimate

    @property
    def needed(self) -> float:
        """Bytes without which it does not run: all kinds at once, and what libraries take."""
        return self.memory.total + OVERHEAD

    @property
    def likely(self) -> float:
        """Bytes that it is likely to reserve: an allocator needs a tenth more for activations."""
        return self.needed + (FRAGMENTS - 1) * self.memory.activations


@dataclass(frozen=True)
class Estimate:
    """What a step takes and holds. ``print`` it for a table.

    Attributes:
        hardware: what it is for.
        layout: the layout, in words.
        stages: for each pipeline rank what it has, takes and holds.
        time: seconds of the step, by term.
        tokens: of the step, over all ranks.
        ranks: how many there are.
        flops: of the step, over all ranks, as usually counted: 6 for every token and weight, and attention.
        notes: what is not in it.
        schedule: the pipeline's, played through with each stage's seconds; ``None`` for one stage, or too many actions.
    """

    hardware: Machine
    layout: str
    stages: tuple[StageEstimate, ...]
    time: StepTime
    tokens: int
    ranks: int
    flops: float
    notes: tuple[str, ...] = field(default=())
    schedule: Timeline | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.time.total

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Fraction of the peak that the model's own operations are (Chowdhery et al. 2022)."""
        return self.flops / (self.seconds * self.ranks * self.hardware.flops)

    @property
    def fullest(self) -> StageEstimate:
        """The rank that is likely to need most memory."""
        return max(self.stages, key=lambda stage: stage.likely)

    @property
    def needed(self) -> float:
        """Bytes of the fullest rank without which it does not run."""
        return self.fullest.needed

    @property
    def likely(self) -> float:
        """Bytes that the fullest rank is likely to reserve."""
        return self.fullest.likely

    @property
    def verdict(self) -> str:
        """``fits``, ``tight`` (the allocator will be short of memory, and slow) or ``does not fit``."""
        if self.needed > self.hardware.memory:
            return DOES_NOT_FIT
        return TIGHT if self.likely > self.hardware.budget else FITS

    def to_json(self, indent: int | None = 2) -> str:
        """All of it as JSON: bytes and seconds."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers and words."""
        return {
            "hardware": self.hardware.name,
            "layout": self.layout,
            "ranks": self.ranks,
            "tokens_per_step": self.tokens,
            "verdict": self.verdict,
            "memory": {
                "needed": self.needed,
                "likely": self.likely,
                "budget": self.hardware.budget,
                "device": self.hardware.memory,
            },
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "time": self.time.terms,
            "stages": [
                {
                    "rank": stage.rank,
                    "layers": stage.layers,
                    "seconds": stage.seconds,
                    "needed": stage.needed,
                    "likely": stage.likely,
                    "memory": stage.memory.kinds,
                }
                for stage in self.stages
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join([*_head(self), "", *_memory_table(self), "", *_time_table(self), "", *self.notes])


def _head(found: Estimate) -> list[str]:
    machine = found.hardware
    return [
        f"{found.layout} on {found.ranks} x {machine.title or machine.name}: {found.verdict} "
        f"({human(round(found.likely))} likely, {human(round(found.needed))} needed of {human(round(machine.memory))})",
        f"{found.seconds:.3g} s for a step of {found.tokens:,} tokens: {found.tokens_per_second:,.0f} tokens/s, "
        f"{found.tokens_per_second / found.ranks:,.0f} per rank, MFU {100 * found.mfu:.1f}%",
    ]


def _memory_table(found: Estimate) -> list[str]:
    kinds = list(found.stages[0].memory.kinds)
    rows = [["rank", "layers", *kinds, "needed", "likely"]]
    for stage in found.stages:
        sizes = [human(stage.memory.kinds[kind]) for kind in kinds]
        last = [human(round(stage.needed)), human(round(stage.likely))]
        rows.append([str(stage.rank), str(stage.layers), *sizes, *last])
    return _table(rows)


def _time_table(found: Estimate) -> list[str]:
    rows = [["seconds", "", "share"]]
    for name, seconds in sorted(found.time.terms.items(), key=lambda item: -item[1]):
        if seconds:
            rows.append([name, f"{seconds:.4f}", f"{100 * seconds / found.seconds:.1f}%"])
    return _table([*rows, ["total", f"{found.seconds:.4f}", "100.0%"]])


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
