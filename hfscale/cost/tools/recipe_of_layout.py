"""Write a recipe for the winner of a search, and suggest its learning rate."""

from dataclasses import dataclass
from typing import Any

import yaml

from ...errors import ConfigError
from ...plan.table import human
from .search import Search


def recipe_of(found: Search, model: str, **training: Any) -> str:
    """Return the text of a recipe that trains ``model`` in the winner's layout, with further keys of its schema."""
    chosen = found.winner.candidate
    own: dict[str, Any] = {"batch_size": found.sequences, "gradient_checkpointing": chosen.recomputes}
    if chosen.job.layout.pp == 1:
        own["microbatch_size"] = chosen.job.batch
    document: dict[str, Any] = {
        "name": "searched",
        "base": model,
        "parallel": chosen.parallel_arguments(),
        "memory": {f"offload_{what}": True for what in chosen.offload},
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
    """Hold a rule for the learning rate when the global batch changes."""

    name: str
    learning_rate: float
    says: str  # where it is from, and what for


# Name, power of the ratio of batches, and where it is from.
_RULES = (
    (
        "square root",
        0.5,
        "Granziol et al. 2022, derived for Adam and its kin, while the batch is smaller than the gradient's noise",
    ),
    (
        "linear",
        1,
        "Goyal et al. 2017, measured with SGD on ImageNet and a warm-up, up to a batch of 8 thousand pictures",
    ),
)


def learning_rates(learning_rate: float, tokens: float, new_tokens: float) -> tuple[Rule, ...]:
    """Scale a learning rate tuned at ``tokens`` per step to ``new_tokens`` per step, by two rules."""
    if min(learning_rate, tokens, new_tokens) <= 0:
        raise ConfigError(
            f"learning rate and tokens per step must be positive, got {learning_rate:g} for {tokens:,.0f} and "
            f"{new_tokens:,.0f} tokens"
        )
    times = new_tokens / tokens
    return tuple(Rule(name, learning_rate * times**power, says) for name, power, says in _RULES)
