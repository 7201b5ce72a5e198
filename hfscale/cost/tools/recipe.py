"""A recipe of what a search found, for ``hfscale train``, and rules of thumb for its learning rate."""

from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ...plan.table import human
from .candidates import Candidate
from .search import Search


def recipe_of(found: Search, model: str, candidate: Candidate | None = None, **training: Any) -> str:
    """Return the text of a recipe file: fine-tuning ``model`` in the layout of the winner, or of another candidate.

    Args:
        model: a path or an id.
        training: further keys: ``training``, ``adapter`` and ``quantization`` as in the recipe's schema.
    """
    chosen = candidate or found.winner.candidate
    own: dict[str, Any] = {"batch_size": found.sequences, "gradient_checkpointing": chosen.recompute}
    if chosen.pp == 1:
        own["microbatch_size"] = chosen.batch
    document: dict[str, Any] = {
        "name": "searched",
        "base": model,
        "parallel": chosen.parallel_arguments(),
        "memory": {f"offload_{what}": True for what in chosen.offload},
        "data": {"source": "train.jsonl", "sequence_length": found.sequence},
        "training": {**own, **training.get("training", {})},
        **{key: value for key, value in training.items() if key != "training"},
    }
    head = [
        f"# Found by `hfscale search` for {found.gpus} x {found.machine.title or found.machine.name}: "
        f"{chosen.describe()}.",
        f"# Estimated, not measured: {found.winner.seconds:.3g} s a step, {human(round(found.winner.likely))} a rank.",
        "# Give data.source, and the learning rate that suits the batch.",
    ]
    return "\n".join([*head, *_lines(document, "")]) + "\n"


def _lines(document: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in document.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_lines(value, f"{indent}  ")] if value else []
        else:
            text = "'no'" if value == "no" else str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"{indent}{key}: {text}")
    return lines


@dataclass(frozen=True)
class Rule:
    """What to do with the learning rate when the global batch changes."""

    name: str
    learning_rate: float
    says: str  # where it is from, and what for


def learning_rates(learning_rate: float, tokens: float, new_tokens: float) -> tuple[Rule, Rule]:
    """Return what a learning rate that was right for ``tokens`` a step becomes for ``new_tokens``, by two rules.

    Raises:
        ConfigError: one of them is not positive.
    """
    if min(learning_rate, tokens, new_tokens) <= 0:
        raise ConfigError(
            f"a learning rate of {learning_rate:g} for {tokens:,.0f} and {new_tokens:,.0f} tokens cannot be: "
            "use positive numbers"
        )
    times = new_tokens / tokens
    return (
        Rule(
            "square root",
            learning_rate * times**0.5,
            "Granziol et al. 2022, derived for Adam and its kin, while the batch is smaller than the gradient's noise",
        ),
        Rule(
            "linear",
            learning_rate * times,
            "Goyal et al. 2017, measured with SGD on ImageNet and a warm-up, up to a batch of 8 thousand pictures",
        ),
    )
