"""Search for the fastest layout for a number of GPUs and a global batch, and write a recipe that uses it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ...errors import ConfigError, check_count
from ...plan.columns import aligned
from ...plan.table import human
from ..model.machines_known import (
    DOES_NOT_FIT,
    FITS,
    Constants,
    Machine,
    find_machine,
    fitted,
    machine_names,
)
from .fast_cost import OFFLOADS, WAYS, CandidateCost, FastCost, candidates, offloading
from .model_summary import ModelSummary

_MOST_TIMES = 256  # if nothing fits, try up to this many times the GPUs


@dataclass(frozen=True)
class Search:
    """Hold the result of a search over layouts: the fastest ones that fit. ``print`` it for tables."""

    machine: Machine
    gpus: int
    sequences: int  # sequences per step
    sequence: int  # tokens per sequence
    budget: float  # upper limit of a rank's likely bytes
    tried: int  # number of candidates
    # The fastest candidates that fit, one per kind of layout, the fastest first.
    best: tuple[CandidateCost, ...]
    # Candidates that fit, and for which no other candidate needs both less memory and less time; the fastest first.
    frontier: tuple[CandidateCost, ...]
    rejected: dict[str, str]  # kind of layout -> why no layout of this kind fits

    @property
    def winner(self) -> CandidateCost:
        """The fastest setting that fits, with its estimated seconds and bytes."""
        return self.best[0]

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.sequences * self.sequence

    @property
    def uses_host(self) -> bool:
        """Return whether the fastest setting offloads to CPU memory; a search that may choose tries this only if
        nothing else fits.
        """
        return bool(self.winner.candidate.offload)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain numbers and strings."""
        return {
            "hardware": self.machine.name,
            "gpus": self.gpus,
            "tokens_per_step": self.tokens,
            "budget": self.budget,
            "tried": self.tried,
            "best": [candidate.to_dict() for candidate in self.best],
            "frontier": [candidate.to_dict() for candidate in self.frontier],
            "rejected": self.rejected,
        }

    def __str__(self) -> str:
        head = (
            f"{self.gpus} x {self.machine.label}, {self.tokens:,} tokens a step, {human(round(self.budget))} for each "
            f"rank: {self.tried:,} layouts"
        )
        note = (
            ["nothing fits without the host's memory, whose size is not checked"]
            if self.uses_host
            else []
        )
        lines = [head, *note, "", "the fastest of each kind", *self._rows(self.best)]
        lines += ["", "less memory for more time", *self._rows(self.frontier)]
        if self.rejected:
            lines += [
                "",
                "what does not fit",
                *(f"{kind}: {why}" for kind, why in self.rejected.items()),
            ]
        return "\n".join(lines)

    def _rows(self, found: Sequence[CandidateCost]) -> list[str]:
        rows = [("seconds", "tokens/s/GPU", "likely", "layout")]
        for candidate in found:
            rate = self.tokens / candidate.seconds / self.gpus
            rows.append(
                (
                    f"{candidate.seconds:.3f}",
                    f"{rate:,.0f}",
                    human(round(candidate.likely)),
                    candidate.candidate.describe(),
                )
            )
        return aligned(rows, left=(3,))


def search(
    summary: ModelSummary,
    gpus: int,
    hardware: str | Machine = "h100",
    *,
    tokens_per_step: int,  # over all ranks; rounded down to whole sequences
    max_memory: float
    | None = None,  # limit of a rank's likely bytes; by default 87.5% of the device's
    only: Mapping[str, Any] | None = None,  # ``levers`` of candidates that are fixed; others vary
    constants: Constants | None = None,  # constants of the time model; by default the fitted ones
) -> Search:
    """Estimate all settings with which ``gpus`` GPUs train a model, and return the fastest ones that fit. Settings with
    offload to CPU memory are tried only if no other fits, or if ``only`` requests offload.
    """
    machine = find_machine(hardware)
    budget = machine.budget if max_memory is None else max_memory
    trial = _Trial(FastCost(summary, machine, constants or fitted()), budget, only or {})
    sequence = summary.job.sequence
    trial.check(gpus, tokens_per_step)
    sequences = tokens_per_step // sequence
    every = trial.run(gpus, sequences)
    if not every:
        divisor = next(count for count in range(gpus, 0, -1) if sequences % count == 0)
        raise ConfigError(
            f"no layout of {gpus} GPUs{trial.asked} can divide {sequences} sequences per step, {summary.heads} "
            f"attention heads and {summary.shape.layers} layers. Nearest: {divisor} GPUs, or a multiple of {gpus} "
            "sequences per step"
        )
    fitting = trial.fitting(every)
    if not fitting and "offload" not in trial.only:
        every += trial.run(gpus, sequences, on_host=True)
        fitting = trial.fitting(every)
    if not fitting:
        raise ConfigError(trial.nothing_fits(every, gpus, sequences))
    best = {candidate.candidate.kind: candidate for candidate in reversed(fitting)}
    frontier = list[CandidateCost]()
    for candidate in fitting:  # a slower layout only if it saves at least 5% memory
        if not frontier or candidate.likely < 0.95 * frontier[-1].likely:
            frontier.append(candidate)
    return Search(
        machine=machine,
        gpus=gpus,
        sequences=sequences,
        sequence=sequence,
        budget=budget,
        tried=len(every),
        best=tuple(sorted(best.values(), key=lambda each: each.seconds)),
        frontier=tuple(frontier),
        rejected={kind: why for kind, why in trial.why(every).items() if kind not in best},
    )


@dataclass
class _Trial:
    """Estimate the settings that a search tries, for one model and machine, and decide which of them fit into a memory
    budget.
    """

    cost: FastCost
    budget: float
    only: Mapping[str, Any]  # levers with fixed values

    def __post_init__(self) -> None:
        self.asked = "".join(f", {name}={value}" for name, value in self.only.items())
        if (again := self.only.get("recompute", WAYS[0])) not in WAYS:
            raise ConfigError(
                f"search tries recompute={', '.join(WAYS)}, got recompute={again!r}: use one of these, or estimate a "
                "single layout with hfscale estimate"
            )

    def check(self, gpus: int, tokens_per_step: int) -> None:
        """Raise :class:`ConfigError` if a step has fewer tokens than one sequence, or if the memory budget is larger
        than the machine's memory.
        """
        machine = self.cost.machine
        sequence = self.cost.summary.job.sequence
        check_count("gpus", gpus)
        if tokens_per_step < sequence:
            raise ConfigError(
                f"{tokens_per_step:,} tokens per step are less than one sequence of {sequence:,} tokens: use more "
                "tokens per step"
            )
        if not 0 < self.budget <= machine.memory:
            raise ConfigError(
                f"a memory budget of {human(round(self.budget))} is invalid on {machine.label}: use more than 0, and "
                f"at most the machine's {human(round(machine.memory))}"
            )

    def run(self, gpus: int, sequences: int, on_host: bool = False) -> list[CandidateCost]:
        """Estimate every setting with which ``gpus`` GPUs train ``sequences`` sequences per step: those without offload
        to CPU memory or, with ``on_host``, those with it.
        """
        layouts = candidates(self.cost.summary, self.cost.machine, gpus, sequences)
        if on_host or self.only.get("offload"):
            layouts = offloading(
                layouts, [self.only["offload"]] if "offload" in self.only else OFFLOADS
            )
        return [
            self.cost.estimate(candidate)
            for candidate in layouts
            if self.only.items() <= candidate.levers.items()
        ]

    def fitting(self, found: Iterable[CandidateCost]) -> list[CandidateCost]:
        """Return those settings in ``found`` whose bytes fit into the memory budget, the fastest first."""
        return sorted(
            (candidate for candidate in found if self._verdict(candidate) == FITS),
            key=lambda each: each.seconds,
        )

    def _verdict(self, found: CandidateCost) -> str:
        return self.cost.machine.verdict(found.needed, found.likely, self.budget)

    def why(self, every: Iterable[CandidateCost]) -> dict[str, str]:
        """Tell, for each combination of parallel axes, why it does not fit: the bytes of the setting in ``every`` with
        the least memory.
        """
        least = dict[str, CandidateCost]()
        for cost in every:
            known = least.get(cost.candidate.kind, cost)
            least[cost.candidate.kind] = min(known, cost, key=lambda one: one.likely)
        return {
            kind: f"at least {human(round(cost.likely))} ({cost.candidate.describe()}), mostly "
            f"{cost.mostly}: "
            + ("does not fit" if self._verdict(cost) == DOES_NOT_FIT else "is over the budget")
            for kind, cost in least.items()
        }

    def nothing_fits(self, every: Sequence[CandidateCost], gpus: int, sequences: int) -> str:
        """Return the text of an error: which of the settings in ``every`` has the least memory, and what would make it
        fit, such as a larger budget or more GPUs.
        """
        machine = self.cost.machine
        budget = self.budget
        least = min(every, key=lambda each: each.likely)
        nearest = (
            [f"a budget of {human(round(least.likely))}"] if least.likely <= machine.budget else []
        )
        count = gpus
        while count < _MOST_TIMES * gpus:
            count *= 2
            fits = self.fitting(self.run(count, max(sequences, count)))
            if fits:
                nearest.append(f"{count} GPUs ({fits[0].candidate.describe()})")
                break
        share = budget / machine.memory
        others = (find_machine(name) for name in machine_names())
        nearest += [
            f"--hardware {m.name}"
            for m in others
            if m.memory > machine.memory and least.likely <= share * m.memory
        ]
        lighter = "LoRA (--lora), over a 4-bit base (--quantize nf4), or an 8-bit optimizer"
        lighter = (
            lighter
            if self.cost.summary.job.trained > 0.5
            else "shorter sequences (--sequence-length)"
        )
        return (
            f"nothing fits: of {len(every):,} layouts of {gpus} x {machine.label} the one with least memory is likely "
            f"to hold {human(round(least.likely))}, of {human(round(budget))} ({least.candidate.describe()}), mostly "
            f"{least.mostly}. Nearest that works: {', '.join(nearest) or f'nothing up to {count} GPUs'}; or try "
            f"{lighter}"
        )


def recipe_of(found: Search, model: str, **training: Any) -> str:
    """Return the text of a recipe (YAML) that trains ``model`` in the fastest layout that a search found; ``training``
    are further sections of the recipe.
    """
    chosen = found.winner.candidate
    own: dict[str, Any] = {"batch_size": found.sequences}
    if chosen.job.layout.pp == 1:
        own["microbatch_size"] = chosen.job.batch
    document: dict[str, Any] = {
        "name": "searched",
        "base": model,
        "parallel": chosen.parallel_arguments(),
        "memory": chosen.memory_arguments(),
        "data": {"source": "train.jsonl", "sequence_length": found.sequence},
        "training": {**own, **training.get("training", {})},
        **{key: value for key, value in training.items() if key != "training"},
    }
    head = (
        f"# Found by `hfscale search` for {found.gpus} x {found.machine.label}: {chosen.describe()}.\n"
        f"# Estimated, not measured: {found.winner.seconds:.3g} s a step, {human(round(found.winner.likely))} a rank.\n"
        "# Give data.source, and the learning rate that suits the batch.\n"
    )
    given = {key: value for key, value in document.items() if value != {}}
    return head + str(yaml.safe_dump(given, sort_keys=False))


@dataclass(frozen=True)
class Rule:
    """Describe a rule for scaling the learning rate with the global batch."""

    name: str
    learning_rate: float
    says: str  # source of the rule, and where it applies


def learning_rates(learning_rate: float, tokens: float, new_tokens: float) -> tuple[Rule, ...]:
    """Scale a learning rate that was tuned with ``tokens`` tokens per step for steps of ``new_tokens`` tokens, by two
    rules: square root and linear.
    """
    if min(learning_rate, tokens, new_tokens) <= 0:
        raise ConfigError(
            f"the learning rate and both numbers of tokens per step must be positive, got {learning_rate:g} for "
            f"{tokens:,.0f} tokens and {new_tokens:,.0f} new tokens: pass positive numbers"
        )
    times = new_tokens / tokens
    root = "Granziol et al. 2022, derived for Adam and its kin, while the batch is smaller than the gradient's noise"
    linear = "Goyal et al. 2017, measured with SGD on ImageNet and a warm-up, up to a batch of 8 thousand pictures"
    return Rule("square root", learning_rate * times**0.5, root), Rule(
        "linear", learning_rate * times, linear
    )
