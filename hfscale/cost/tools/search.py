"""The best layout for a number of GPUs and a global batch: all candidates, what each kind is worth, and what fails."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import ConfigError, check_count
from ...plan.table import aligned, human
from ..model.machine import DOES_NOT_FIT, FITS, Constants, Machine, find_machine, fitted, machine_names
from .candidates import candidates, offloading
from .fast_cost import CandidateCost, FastCost
from .model_summary import ModelSummary

_MOST_TIMES = 256  # as many GPUs as asked for, tried where nothing fits


@dataclass(frozen=True)
class Search:
    """What a search found. ``print`` it for tables."""

    machine: Machine
    gpus: int
    sequences: int  # of a step
    sequence: int  # tokens of one
    budget: float  # bytes that a rank may be likely to hold
    tried: int  # how many candidates there were
    best: tuple[CandidateCost, ...]  # the fastest that fit, one for each kind of layout, the fastest first
    frontier: tuple[CandidateCost, ...]  # of all that fit, those that nothing beats in memory and time, likewise
    rejected: dict[str, str]  # kind of layout -> why none of it fits

    @property
    def winner(self) -> CandidateCost:
        """The fastest."""
        return self.best[0]

    @property
    def uses_host(self) -> bool:
        """Whether nothing fits but with something in the host's memory."""
        return bool(self.winner.candidate.offload)

    def to_json(self, indent: int | None = 2) -> str:
        """Return all of it as JSON: bytes and seconds."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain numbers and words."""

        def row(found: CandidateCost) -> dict[str, Any]:
            numbers = {"seconds": found.seconds, "needed": found.needed, "likely": found.likely}
            return {**asdict(found.candidate), "kind": found.candidate.kind, **numbers}

        return {
            "hardware": self.machine.name,
            "gpus": self.gpus,
            "tokens_per_step": self.sequences * self.sequence,
            "budget": self.budget,
            "tried": self.tried,
            "best": [row(found) for found in self.best],
            "frontier": [row(found) for found in self.frontier],
            "rejected": self.rejected,
        }

    def __str__(self) -> str:
        head = (
            f"{self.gpus} x {self.machine.title or self.machine.name}, {self.sequences * self.sequence:,} tokens a "
            f"step, {human(round(self.budget))} for each rank: {self.tried:,} layouts"
        )
        note = ["nothing fits without the host's memory, whose size is not checked"] if self.uses_host else []
        lines = [head, *note, "", "the fastest of each kind", *self._rows(self.best)]
        lines += ["", "less memory for more time", *self._rows(self.frontier)]
        if self.rejected:
            lines += ["", "what does not fit", *(f"{kind}: {why}" for kind, why in self.rejected.items())]
        return "\n".join(lines)

    def _rows(self, found: Sequence[CandidateCost]) -> list[str]:
        rows = [("seconds", "tokens/s/GPU", "likely", "layout")]
        for each in found:
            rate = self.sequences * self.sequence / each.seconds / self.gpus
            rows.append((f"{each.seconds:.3f}", f"{rate:,.0f}", human(round(each.likely)), each.candidate.describe()))
        return aligned(rows, left=(3,))


def search(
    summary: ModelSummary,
    gpus: int,
    hardware: str | Machine = "h100",
    *,
    tokens_per_step: int,
    sequence_length: int = 4096,
    max_memory: float | None = None,
    constants: Constants | None = None,
) -> Search:
    """Estimate all layouts of a model on so many GPUs, and return the best of them.

    Args:
        summary: of the model, and of how it is trained.
        gpus: ranks of the run.
        hardware: as for :func:`hfscale.estimate`.
        tokens_per_step: of all ranks; sequences are whole, so it may be a little less.
        sequence_length: tokens of a sequence.
        max_memory: bytes that a rank may be likely to hold; by default 87.5% of the device's.
        constants: of time; by default those fitted on public runs.

    Raises:
        ConfigError: nothing fits; the message names what would.
    """
    found = _Tried(summary, find_machine(hardware), constants or fitted(), sequence_length, max_memory)
    return found.search(gpus, tokens_per_step)


class _Tried:
    """The candidates of one model on one machine.

    Attributes:
        every: those that were tried, with what they take and hold.
    """

    def __init__(
        self, summary: ModelSummary, machine: Machine, constants: Constants, sequence: int, budget: float | None
    ) -> None:
        self.summary, self.machine, self.sequence = summary, machine, sequence
        self.budget = machine.budget if budget is None else budget
        self.cost, self.every = FastCost(summary, machine, constants, sequence), list[CandidateCost]()

    def search(self, gpus: int, tokens_per_step: int) -> Search:
        """Try all, those that need the host's memory only where no others fit."""
        self._check(gpus, tokens_per_step)
        sequences = tokens_per_step // self.sequence
        self.every = self._try(gpus, sequences)
        if not self.every:
            raise ConfigError(self._no_candidates(gpus, sequences))
        fitting = self._fitting(self.every)
        if not fitting:  # the slowest of memories, for where no other is left
            self.every += self._try(gpus, sequences, on_host=True)
            fitting = self._fitting(self.every)
        if not fitting:
            raise ConfigError(self._nothing_fits(gpus, sequences))
        best = {each.candidate.kind: each for each in reversed(fitting)}
        best = dict(sorted(best.items(), key=lambda item: item[1].seconds))
        return Search(
            machine=self.machine,
            gpus=gpus,
            sequences=sequences,
            sequence=self.sequence,
            budget=self.budget,
            tried=len(self.every),
            best=tuple(best.values()),
            frontier=_frontier(fitting),
            rejected={kind: why for kind, why in self._why().items() if kind not in best},
        )

    def _check(self, gpus: int, tokens_per_step: int) -> None:
        machine, sequence = self.machine, self.sequence
        check_count("gpus", gpus)
        check_count("sequence_length", sequence)
        if tokens_per_step < sequence:
            raise ConfigError(
                f"{tokens_per_step:,} tokens a step are less than one sequence of {sequence:,}: use at least so many"
            )
        if not 0 < self.budget <= machine.memory:
            raise ConfigError(
                f"a budget of {human(round(self.budget))} is impossible on {machine.title or machine.name}: use more "
                f"than none, and at most its {human(round(machine.memory))}"
            )

    def _try(self, gpus: int, sequences: int, on_host: bool = False) -> list[CandidateCost]:
        """Estimate every candidate; with ``on_host`` those that keep something in the host's memory instead."""
        plain = candidates(self.summary, self.machine, gpus, sequences, self.sequence)
        return [self.cost.estimate(each) for each in (offloading(plain) if on_host else plain)]

    def _verdict(self, found: CandidateCost) -> str:
        return self.machine.verdict(found.needed, found.likely, self.budget)

    def _fitting(self, found: Iterable[CandidateCost]) -> list[CandidateCost]:
        """Return those that fit, the fastest first."""
        return sorted((each for each in found if self._verdict(each) == FITS), key=lambda each: each.seconds)

    def _why(self) -> dict[str, str]:
        """Say for each kind of layout what the one with least memory needs, and most of what."""
        least: dict[str, CandidateCost] = {}
        for each in self.every:
            known = least.get(each.candidate.kind)
            if known is None or each.likely < known.likely:
                least[each.candidate.kind] = each
        return {
            kind: f"at least {human(round(each.likely))} ({each.candidate.describe()}), mostly {_mostly(each)}: "
            + ("does not fit" if self._verdict(each) == DOES_NOT_FIT else "is over the budget")
            for kind, each in least.items()
        }

    def _no_candidates(self, gpus: int, sequences: int) -> str:
        divisor = next(count for count in range(gpus, 0, -1) if sequences % count == 0)
        summary = self.summary
        return (
            f"no layout of {gpus} GPUs has whole sequences for each: {sequences} sequences a step, {summary.heads} "
            f"heads and {summary.shape.layers} layers leave none. Nearest: {divisor} GPUs, or a multiple of {gpus} "
            "sequences a step"
        )

    def _nothing_fits(self, gpus: int, sequences: int) -> str:
        """Say what holds least, what works (a larger budget, more GPUs, another machine), and what else to try."""
        machine, budget = self.machine, self.budget
        least = min(self.every, key=lambda each: each.likely)
        nearest = [f"a budget of {human(round(least.likely))}"] if least.likely <= machine.budget else []
        count = gpus
        while count < _MOST_TIMES * gpus:
            count *= 2
            fits = self._fitting(self._try(count, max(sequences, count)))
            if fits:
                nearest.append(f"{count} GPUs ({fits[0].candidate.describe()})")
                break
        share = budget / machine.memory
        others = (find_machine(name) for name in machine_names())
        nearest += [
            f"--hardware {m.name}" for m in others if m.memory > machine.memory and least.likely <= share * m.memory
        ]
        lighter = "LoRA (--lora), over a 4-bit base (--quantize nf4), or an 8-bit optimizer"
        lighter = lighter if self.summary.job.trained > 0.5 else "shorter sequences (--sequence-length)"
        return (
            f"nothing fits: of {len(self.every):,} layouts of {gpus} x {machine.title or machine.name} the one with "
            f"least memory is likely to hold {human(round(least.likely))}, of {human(round(budget))} "
            f"({least.candidate.describe()}), mostly {_mostly(least)}. Nearest that works: "
            f"{', '.join(nearest) or f'nothing up to {count} GPUs'}; or try {lighter}"
        )


def _mostly(found: CandidateCost) -> str:
    return "weights, gradients and optimizer" if found.states > found.activations else "activations"


def _frontier(fitting: Iterable[CandidateCost]) -> tuple[CandidateCost, ...]:
    """Return the Pareto frontier: a slower layout only if it saves at least 5% memory."""
    kept: list[CandidateCost] = []
    for each in fitting:
        if not kept or each.likely < 0.95 * kept[-1].likely:
            kept.append(each)
    return tuple(kept)
