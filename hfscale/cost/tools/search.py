"""The best layout for a number of GPUs and a global batch: all candidates, what each kind is worth, and what fails."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import ConfigError
from ...plan.table import human
from ..model.constants import Constants, fitted
from ..model.machine import Machine, find_machine, machine_names
from .candidates import Candidate, candidates, offloading
from .fast_cost import CandidateCost, FastCost
from .model_summary import ModelSummary
from .report import DOES_NOT_FIT, FITS

_MOST_TIMES = 256  # as many GPUs as asked for, tried where nothing fits


@dataclass(frozen=True)
class Search:
    """What a search found. ``print`` it for tables.

    Attributes:
        machine: that it was for.
        gpus: how many.
        sequences: of a step.
        sequence: tokens of one.
        budget: bytes that a rank may be likely to hold.
        tried: how many candidates there were.
        best: the fastest that fit, one for each kind of layout, the fastest first.
        frontier: of all that fit, those that nothing beats in both memory and time, the fastest first.
        rejected: kind of layout -> why none of it fits.
    """

    machine: Machine
    gpus: int
    sequences: int
    sequence: int
    budget: float
    tried: int
    best: tuple[CandidateCost, ...]
    frontier: tuple[CandidateCost, ...]
    rejected: dict[str, str]

    @property
    def winner(self) -> CandidateCost:
        """The fastest."""
        return self.best[0]

    @property
    def uses_host(self) -> bool:
        """Whether nothing fits but with something in the host's memory."""
        return bool(self.winner.candidate.offload)

    def to_json(self, indent: int | None = 2) -> str:
        """All of it as JSON: bytes and seconds."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers and words."""

        def row(found: CandidateCost) -> dict[str, Any]:
            return {**asdict(found.candidate), "kind": found.candidate.kind, **_numbers(found)}

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
        tokens = self.sequences * self.sequence
        head = (
            f"{self.gpus} x {self.machine.title or self.machine.name}, {tokens:,} tokens a step, "
            f"{human(round(self.budget))} for each rank: {self.tried:,} layouts"
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
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return ["  ".join([*(c.rjust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]


def search(
    facts: ModelSummary,
    gpus: int,
    hardware: str | Machine = "h100",
    *,
    tokens_per_step: int,
    sequence_length: int = 4096,
    max_memory: float | None = None,
    constants: Constants | None = None,
) -> Search:
    """All layouts of a model on so many GPUs, and the best of them.

    Args:
        facts: of the model, and of how it is trained.
        gpus: ranks of the run.
        hardware: as for :func:`hfscale.estimate`.
        tokens_per_step: of all ranks; sequences are whole, so it may be a little less.
        sequence_length: tokens of a sequence.
        max_memory: bytes that a rank may be likely to hold; by default 87.5% of the device's.
        constants: of time; by default those fitted on public runs.

    Raises:
        ConfigError: nothing fits; the message names what would.
    """
    machine, given = find_machine(hardware), constants or fitted()
    _check_sizes(gpus, tokens_per_step, sequence_length)
    sequences = tokens_per_step // sequence_length
    budget = machine.budget if max_memory is None else max_memory
    if not 0 < budget <= machine.memory:
        raise ConfigError(
            f"a budget of {human(round(budget))} is impossible on {machine.title or machine.name}: use more than none, "
            f"and at most its {human(round(machine.memory))}"
        )
    sizes = gpus, sequences, sequence_length
    found = tried(facts, machine, given, *sizes)
    if not found:
        raise ConfigError(_no_candidates(facts, gpus, sequences))
    fitting = _fitting(found, machine, budget)
    if not fitting:  # the slowest of memories, for where no other is left
        found += tried(facts, machine, given, *sizes, on_host=True)
        fitting = _fitting(found, machine, budget)
    if not fitting:
        nearest = _nearest(facts, machine, given, sizes, budget, found)
        raise ConfigError(f"{_nothing_fits(machine, gpus, budget, found)}. Nearest that works: {nearest}")
    best = {each.candidate.kind: each for each in reversed(fitting)}
    best = dict(sorted(best.items(), key=lambda item: item[1].seconds))
    return Search(
        machine=machine,
        gpus=gpus,
        sequences=sequences,
        sequence=sequence_length,
        budget=budget,
        tried=len(found),
        best=tuple(best.values()),
        frontier=_frontier(fitting),
        rejected={kind: why for kind, why in _why(found, machine, budget).items() if kind not in best},
    )


def _check_sizes(gpus: int, tokens_per_step: int, sequence_length: int) -> None:
    for name, value in (("gpus", gpus), ("sequence_length", sequence_length)):
        if value < 1:
            raise ConfigError(f"{name}={value} is impossible: use a whole number of at least 1")
    if tokens_per_step < sequence_length:
        raise ConfigError(
            f"{tokens_per_step:,} tokens a step are less than one sequence of {sequence_length:,}: use at least so many"
        )


def tried(
    facts: ModelSummary,
    machine: Machine,
    constants: Constants,
    gpus: int,
    sequences: int,
    sequence: int,
    on_host: bool = False,
) -> list[CandidateCost]:
    """Every candidate with what it takes and holds.

    Args:
        on_host: those that keep something in the host's memory, instead of all others.
    """
    quick = FastCost(facts, machine, constants, sequence)
    plain = candidates(facts, machine, gpus, sequences, sequence)
    return [quick.estimate(each) for each in (offloading(plain) if on_host else plain)]


def _fitting(found: Iterable[CandidateCost], machine: Machine, budget: float) -> list[CandidateCost]:
    """Those that fit, the fastest first."""
    return sorted((each for each in found if each.verdict(machine, budget) == FITS), key=lambda each: each.seconds)


def _frontier(fitting: Iterable[CandidateCost]) -> tuple[CandidateCost, ...]:
    """Those that no faster one beats in memory by a twentieth."""
    kept: list[CandidateCost] = []
    for each in fitting:
        if not kept or each.likely < 0.95 * kept[-1].likely:
            kept.append(each)
    return tuple(kept)


def _why(found: Iterable[CandidateCost], machine: Machine, budget: float) -> dict[str, str]:
    """For each kind of layout what the one with least memory needs, and most of what."""
    least: dict[str, CandidateCost] = {}
    for each in found:
        known = least.get(each.candidate.kind)
        if known is None or each.likely < known.likely:
            least[each.candidate.kind] = each
    return {kind: _say(each, machine, budget) for kind, each in least.items()}


def _say(found: CandidateCost, machine: Machine, budget: float) -> str:
    mostly = "weights, gradients and optimizer" if found.states > found.activations else "activations"
    over = "does not fit" if found.verdict(machine, budget) == DOES_NOT_FIT else "is over the budget"
    return f"at least {human(round(found.likely))} ({found.candidate.describe()}), mostly {mostly}: {over}"


def _no_candidates(facts: ModelSummary, gpus: int, sequences: int) -> str:
    divisors = [count for count in range(gpus, 0, -1) if sequences % count == 0]
    return (
        f"no layout of {gpus} GPUs has whole sequences for each: {sequences} sequences a step, {facts.heads} heads and "
        f"{facts.shape.layers} layers leave none. Nearest: {divisors[0]} GPUs, or a multiple of {gpus} sequences a step"
    )


def _nothing_fits(machine: Machine, gpus: int, budget: float, found: Sequence[CandidateCost]) -> str:
    least = min(found, key=lambda each: each.likely)
    mostly = "weights, gradients and optimizer" if least.states > least.activations else "activations"
    return (
        f"nothing fits: of {len(found):,} layouts of {gpus} x {machine.title or machine.name} the one with least "
        f"memory is likely to hold {human(round(least.likely))}, of {human(round(budget))} "
        f"({least.candidate.describe()}), mostly {mostly}"
    )


def _nearest(
    facts: ModelSummary,
    machine: Machine,
    constants: Constants,
    sizes: tuple[int, int, int],
    budget: float,
    found: Sequence[CandidateCost],
) -> str:
    """What works: a larger budget, more GPUs, or another machine; and what else to try."""
    gpus, sequences, sequence = sizes
    least = min(found, key=lambda each: each.likely)
    nearest = [f"a budget of {human(round(least.likely))}"] if least.likely <= machine.budget else []
    count = gpus
    while count < _MOST_TIMES * gpus:
        count *= 2
        more = tried(facts, machine, constants, count, max(sequences, count), sequence)
        fits = [each for each in more if each.verdict(machine, budget) == FITS]
        if fits:
            nearest.append(f"{count} GPUs ({min(fits, key=lambda each: each.seconds).candidate.describe()})")
            break
    share = budget / machine.memory
    others = (find_machine(name) for name in machine_names())
    nearest += [
        f"--hardware {m.name}" for m in others if m.memory > machine.memory and least.likely <= share * m.memory
    ]
    lighter = "LoRA (--lora), over a 4-bit base (--quantize nf4), or an 8-bit optimizer"
    lighter = lighter if facts.trained > 0.5 else "shorter sequences (--sequence-length)"
    return f"{', '.join(nearest) or f'nothing up to {count} GPUs'}; or try {lighter}"


def parallel_arguments(candidate: Candidate) -> dict[str, Any]:
    """Arguments of :class:`hfscale.ParallelConfig`."""
    sizes: dict[str, Any] = {"tp_size": candidate.tp, "pp_size": candidate.pp, "cp_size": candidate.cp}
    sizes |= {"ep_size": candidate.ep, "dp_shard_size": candidate.shard, "dp_replicate_size": candidate.replicate}
    found = {name: size for name, size in sizes.items() if size > 1}
    if candidate.tp > 1:
        found["sequence_parallel"] = True
    if candidate.pp > 1:
        found |= {"pipeline_schedule": candidate.schedule, "num_microbatches": candidate.microbatches}
        found |= {"virtual_stages": candidate.virtual} if candidate.virtual > 1 else {}
    return found


def _numbers(found: CandidateCost) -> dict[str, float]:
    return {"seconds": found.seconds, "needed": found.needed, "likely": found.likely}
